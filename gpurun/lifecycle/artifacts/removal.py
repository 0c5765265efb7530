"""Remove the large files of finished runs from this disk: downloaded files, and the shards that were made for them.

Journal, receipt, log and events stay, so that the run can still be audited, reported and counted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.journal_events import RunOpened
from gpurun.core.journal_records import last_typed
from gpurun.core.paths import Home, RunFolder, write_atomic
from gpurun.ledger.runs import Sight, look_at_run, planned_runs

CHECKPOINT_ENDS = (".safetensors", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Removal:
    """The large files of a run that would be removed. `checkpoints` names the checkpoints among them."""

    folder: RunFolder
    files: int
    bytes: int
    checkpoints: tuple[str, ...]
    bucket: str
    """The bucket that has the run's staged data; "" if none."""

    @property
    def is_nothing(self) -> bool:
        """Return whether there is nothing to remove."""
        return self.files == 0


def removal_of(home: Home, name: str) -> Removal:
    """Return what would be removed.

    Raise UsageError if the run is not over, if an unfinished run continues it, or if one of its folders is a link.
    """
    sight = look_at_run(home, name)
    if sight.unfinished:
        what = f"{name} is not over: its machine is not proven gone, or its journal is not closed."
        raise UsageError("rm.unfinished", what, hint=f"gpurun stop {name} ends it; gpurun ps shows its state.")
    if needed_by := _find_continuing_run(home, name):
        what = f"{needed_by} continues {name} and is not over."
        raise UsageError("rm.needed", what, hint=f"Wait for its end: gpurun wait {needed_by}")
    folder, found = sight.folder, list[Path]()
    for place in _list_places(folder):
        if place.is_symlink():
            what = f"{place} is a link, and its target may belong to another run too."
            raise UsageError("rm.link", what, hint="Remove its target yourself, if nothing else needs it.")
        found += [path for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    return Removal(
        folder=folder,
        files=len(found),
        bytes=sum(path.stat().st_size for path in found),
        checkpoints=tuple(sorted(_list_checkpoints(sight, found))),
        bucket=sight.plan.choices.stage or "",
    )


def remove(removal: Removal, wall: float) -> None:
    """Remove the files, after noting how many there are and the time. A second call finishes an interrupted removal."""
    note = {"v": 1, "wall": wall, "files": removal.files, "bytes": removal.bytes}
    try:
        write_atomic(removal.folder.removed, json.dumps(note).encode() + b"\n")
        for place in _list_places(removal.folder):
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
    except OSError as error:
        what = f"{removal.folder.path} could not be cleared: {error.strerror}."
        raise SetupError("rm.failed", what, hint="Give yourself write access to it, then try again.") from error


def _list_places(folder: RunFolder) -> tuple[Path, ...]:
    return folder.artifacts, folder.data


def _find_continuing_run(home: Home, name: str) -> str:
    """Return the name of an unfinished run that continues this run; "" if there is none."""
    for other in planned_runs(home, only_open=True):
        opened = last_typed(look_at_run(home, other).records, RunOpened)
        if opened is not None and (opened.continues or {}).get("run") == name:
            return other
    return ""


def _list_checkpoints(sight: Sight, found: Iterable[Path]) -> Iterator[str]:
    """Yield the checkpoint files among those that would be removed."""
    for path in found:
        name = os.path.relpath(path, sight.folder.artifacts)
        if name.startswith("checkpoints/") or (name.endswith(CHECKPOINT_ENDS) and not name.startswith("..")):
            yield name
