"""What a run folder knows of files that came home by other ways than the collect step, from one process to the next.

`manifest.json` is the last list of finished files that the machine gave: when it is lost, that says what it had.
`kept.json` names the files that a person has asked for, which no later checkpoint replaces here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from gpurun.core.exclusive import exclusive
from gpurun.core.paths import RunFolder, write_atomic
from gpurun.machine.answers import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile, understood_manifest
from gpurun.machine.base import FarRefusal
from gpurun.machine.fetch import Wanted, holds


def is_here(artifacts: Path, file: ManifestFile) -> bool:
    """Whether that very file is at home, by its digest."""
    return holds(artifacts / file.name, Wanted(file.name, file.bytes, file.sha256))


def remember(folder: RunFolder, manifest: Manifest) -> None:
    """Note what the machine has finished by now; OSError when this disk takes nothing more."""
    write_atomic(folder.path / "manifest.json", manifest.model_dump_json().encode())


def remembered(folder: RunFolder) -> Manifest | None:
    """What the machine had finished when it was heard last; None when it never told."""
    try:
        return understood_manifest((folder.path / "manifest.json").read_bytes(), MOST_ANNOUNCED_BYTES)
    except (FileNotFoundError, FarRefusal):
        return None


def keep(folder: RunFolder, names: Iterable[str]) -> None:
    """Note that a person wants these."""
    with exclusive(folder.path / ".kept.lock"):
        write_atomic(folder.path / "kept.json", json.dumps(sorted({*kept(folder), *names})).encode())


def kept(folder: RunFolder) -> set[str]:
    """The names of the files that a person has asked for."""
    try:
        return {str(name) for name in json.loads((folder.path / "kept.json").read_bytes())}
    except (FileNotFoundError, ValueError, TypeError):
        return set()
