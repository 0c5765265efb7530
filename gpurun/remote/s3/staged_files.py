"""Records what a run has in a bucket before anything is rented. The run's upload uses this record."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from gpurun.core.records import Frozen
from gpurun.remote.archive import PackedFile
from gpurun.remote.s3.objects import Index
from gpurun.remote.s3.s3_upload import FileDigests


class StagedFile(Frozen):
    """The record of a file: its state on this computer when it was read, its digests then, and its parts' sizes."""

    name: str
    seen: tuple[int, ...]
    sha256: str
    bytes: int
    part_bytes: int
    digests: tuple[str, ...]
    sent: tuple[int, ...]

    def is_of(self, file: PackedFile) -> bool:
        """Return whether this record describes `file` in its current state."""
        return (self.name, self.bytes, self.seen) == (file.name, file.bytes, file.seen)


class Staged(Frozen):
    """The files of one run that are in a bucket."""

    v: Literal[1] = 1
    url: str
    files: tuple[StagedFile, ...]


def staged_file(file: PackedFile, digests: FileDigests, index: Index) -> StagedFile:
    """Return the record of a staged file."""
    return StagedFile(
        name=file.name,
        seen=file.seen,
        sha256=digests.sha256,
        bytes=file.bytes,
        part_bytes=digests.part_bytes,
        digests=digests.parts,
        sent=index.sent,
    )


def read_staged(path: Path) -> Staged | None:
    """Return the record; None if it is missing or unreadable."""
    try:
        return Staged.from_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
