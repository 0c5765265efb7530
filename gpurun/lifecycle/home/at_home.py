"""What a run folder knows of files that came home by other ways than the collect step, from one process to the next.

`manifest.json` is the last list of finished files that the machine gave: when it is lost, that says what it had.
`newest.json` names the newest checkpoint that came home whole while training went on, and the files that came so.
`kept.json` names the files that a person has asked for, which no later checkpoint replaces here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gpurun.core.exclusive import exclusive
from gpurun.core.paths import RunFolder, write_atomic
from gpurun.machine.answers import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile, understood_manifest
from gpurun.machine.base import FarRefusal
from gpurun.machine.fetch import PARTIAL_FOLDER, Wanted, holds
from gpurun.machine.partial import forget_others


def is_here(artifacts: Path, file: ManifestFile) -> bool:
    """Whether that very file is at home, by its digest."""
    return holds(artifacts / file.name, Wanted(file.name, file.bytes, file.sha256))


def remember(folder: RunFolder, manifest: Manifest) -> None:
    """Note what the machine has finished by now; OSError when this disk takes nothing more.

    What has arrived of files that were replaced over there can never be completed: its room is given back.
    """
    forget_others(folder.artifacts / PARTIAL_FOLDER, {file.sha256 for file in manifest.files})
    write_atomic(folder.path / "manifest.json", manifest.model_dump_json().encode())


def remembered(folder: RunFolder) -> Manifest | None:
    """What the machine had finished when it was heard last, and `with_whole`; None when it never told."""
    try:
        listed = understood_manifest((folder.path / "manifest.json").read_bytes(), MOST_ANNOUNCED_BYTES)
    except (OSError, FarRefusal):
        return None
    return with_whole(folder, listed)


def with_whole(folder: RunFolder, listed: Manifest) -> Manifest:
    """The same, with the newest checkpoint that came home whole: on a slow line two later ones may have replaced it."""
    names = {file.name for file in listed.files}
    more = [file for file in Brought.read(folder).whole if file.name not in names]
    here = [file for file in more if _size_of(folder.artifacts / file.name) == file.bytes]
    return listed.model_copy(update={"files": (*listed.files, *here)})


def _size_of(path: Path) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else -1  # Path.is_file raises where a folder is shut to us.


class Brought(BaseModel):
    """What came home while training went on: `files` by name, and of the newest `whole` checkpoint its step."""

    model_config = ConfigDict(frozen=True)

    step: int | None = None
    files: tuple[str, ...] = ()
    whole: tuple[ManifestFile, ...] = ()

    @classmethod
    def read(cls, folder: RunFolder) -> Brought:
        """What is noted; nothing where there is no note, or none that can be understood."""
        try:
            return cls.model_validate_json((folder.path / "newest.json").read_bytes())
        except (OSError, ValidationError):
            return cls()

    def write(self, folder: RunFolder) -> None:
        """Note it; OSError when this disk takes nothing more."""
        write_atomic(folder.path / "newest.json", self.model_dump_json().encode())


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
