"""What journal and receipt have of the files that came home, and of those that did not, and their lists read back.

Of very many files the record has the first, and one digest over a list of all that lies in the run's folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from gpurun.core.paths import RunFolder, read_regular

HERE, MISSING = "collected.list", "missing.list"
MOST_BYTES = 512 << 20
NAMED = 20
"""So many of those that are missing are named in a receipt, which has the number of all."""


class FileAtHome(TypedDict):
    """A file that came home."""

    name: str
    bytes: int | None
    sha256: str
    kind: str | None
    step: Any


class FileListTold(TypedDict):
    """How many files a list in the run's folder has, and its digest."""

    files: int
    bytes: NotRequired[int]
    sha256: str


class CheckpointTold(TypedDict):
    """The step of the latest checkpoint, step and loss of the best, what came home, and the names of what did not.

    Of very many files the first stand here, and `listed`, `missing_files` are about the lists of all.
    """

    latest: Any
    best: Any
    files: list[FileAtHome]
    missing: NotRequired[list[Any] | None]
    listed: NotRequired[FileListTold]
    missing_files: NotRequired[FileListTold]


def read_stated_files(
    folder: RunFolder, files: Sequence[Mapping[str, Any]], listed: FileListTold | None
) -> list[dict[str, Any]]:
    """Return every file that a record or receipt states; ValueError where their list is not there as it was written."""
    if not listed:
        return [dict(file) for file in files]
    lines = _read(folder, HERE, str(listed["sha256"])).decode("ascii").splitlines()
    keys = ("sha256", "bytes", "kind", "step", "name")
    found = (dict(zip(keys, line.split(" "), strict=True)) for line in lines)
    return [{**file, "bytes": int(file["bytes"]), "step": int(file["step"])} for file in found]


def missing_of(folder: RunFolder, missing: Sequence[str], listed: FileListTold | None) -> list[str]:
    """Return the name of each file that did not come home; ValueError as `read_stated_files`."""
    if not listed:
        return list(missing)
    return _read(folder, MISSING, str(listed["sha256"])).decode("ascii").splitlines()


def _read(folder: RunFolder, name: str, sha256: str) -> bytes:
    try:
        content = read_regular(folder.path / name, MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{name} is not the list that was written")
    return content
