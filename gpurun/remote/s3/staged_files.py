"""Records, before anything is rented, what a run has in the bucket; the run's upload relies on this record."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from gpurun.core.records import Frozen
from gpurun.remote.archive import PackedFile
from gpurun.remote.s3.objects import Index
from gpurun.remote.s3.s3_upload import FileDigests


class StagedFile(Frozen):
    """One file: its state here when it was read, the digests found then, and where its parts are."""

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
    """The files of one run that are in the bucket."""

    v: Literal[1] = 1
    url: str
    files: tuple[StagedFile, ...]


def staged_file(file: PackedFile, digests: FileDigests, index: Index) -> StagedFile:
    """Return the record of a file that was staged."""
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
    """Return the record; None if there is none."""
    try:
        return Staged.from_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
