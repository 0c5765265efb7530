"""What a run has in the bucket, written down here before anything is rented: the run's shipping rests on it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from gpurun.core.records import Frozen
from gpurun.remote.archive import PackedFile
from gpurun.remote.s3.objects import Index
from gpurun.remote.s3.s3_upload import FileDigests


class StagedFile(Frozen):
    """One file: how it looked here when it was read, the digests that were found then, and where its parts are."""

    name: str
    seen: tuple[int, ...]
    sha256: str
    bytes: int
    part_bytes: int
    digests: tuple[str, ...]
    sent: tuple[int, ...]

    def is_of(self, file: PackedFile) -> bool:
        """Whether this is about that file, as it is now."""
        return (self.name, self.bytes, self.seen) == (file.name, file.bytes, file.seen)


class Staged(Frozen):
    """The files of one run that are in the bucket."""

    v: Literal[1] = 1
    url: str
    files: tuple[StagedFile, ...]


def staged_file(file: PackedFile, digests: FileDigests, index: Index) -> StagedFile:
    """What is to be remembered of a file that was staged."""
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
    """What was written down; None when nothing was."""
    try:
        return Staged.from_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
