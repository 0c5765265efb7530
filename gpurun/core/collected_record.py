"""The records of downloaded and missing files in journal and receipt, and the reader of the full lists.

If there are very many files, a record has only the first of them, and the digest of a full list in the run's folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from gpurun.core.paths import RunFolder, read_regular

COLLECTED, MISSING = "collected.list", "missing.list"
MOST_BYTES = 512 << 20
NAMED = 20
"""The most missing files that a receipt names; it always has their total number."""


class FileAtHome(TypedDict):
    """A downloaded file in a receipt."""

    name: str
    bytes: int | None
    sha256: str
    kind: str | None
    step: Any


class FileListDigest(TypedDict):
    """The length of a file list in the run's folder, and its digest."""

    files: int
    bytes: NotRequired[int]
    sha256: str


class ReceiptCheckpoint(TypedDict):
    """The latest step, the best checkpoint's step and loss, the downloaded files, and the names of missing files.

    If there are very many files, `files` and `missing` have only the first ones; `listed` and `missing_files` have the
    digests of the full lists.
    """

    latest: Any
    best: Any
    files: list[FileAtHome]
    missing: NotRequired[list[Any] | None]
    listed: NotRequired[FileListDigest]
    missing_files: NotRequired[FileListDigest]


def read_stated_files(
    folder: RunFolder, files: Sequence[Mapping[str, Any]], listed: FileListDigest | None
) -> list[dict[str, Any]]:
    """Return all downloaded files of a record or receipt: its `files`, or the full list that has the digest `listed`.

    Raise ValueError if that list is missing or was changed.
    """
    if not listed:
        return [dict(file) for file in files]
    lines = _read_checked(folder, COLLECTED, str(listed["sha256"])).decode("ascii").splitlines()
    keys = ("sha256", "bytes", "kind", "step", "name")
    found = (dict(zip(keys, line.split(" "), strict=True)) for line in lines)
    return [{**file, "bytes": int(file["bytes"]), "step": int(file["step"])} for file in found]


def missing_of(folder: RunFolder, missing: Sequence[str], listed: FileListDigest | None) -> list[str]:
    """Return the names of all missing files, from the record or the full list; ValueError as in `read_stated_files`."""
    if not listed:
        return list(missing)
    return _read_checked(folder, MISSING, str(listed["sha256"])).decode("ascii").splitlines()


def _read_checked(folder: RunFolder, name: str, sha256: str) -> bytes:
    try:
        content = read_regular(folder.path / name, MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{name} is not the list that was recorded")
    return content
