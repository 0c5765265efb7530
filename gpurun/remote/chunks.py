"""The protocol by which a pack is sent in parts and a file is downloaded in ranges; and the parts of a pack.

A pack is the content of its files, joined and cut into parts of one size. Each part has its own sha256, and is
compressed separately. Upload (`upload.py` here, `agent/receive.py` and `agent/finish_upload.py` on the machine):

1. `begin` announces the layout: the part size, and the files' names and sizes. With `--held ask` the machine first
   replies with the digests of complete files that an earlier pack or a bucket has brought; then the rest is announced
   again (`--held settled`). Finally it replies which parts an interrupted upload has left, as lines `INDEX SHA256`.
2. `receive`, in several parallel lanes, reads a stream of parts: each is a `PART_HEAD` (index, length, length as sent,
   sha256) and its bytes; `END_OF_PARTS` ends the stream. A verified part is written to its place in the files and
   recorded in `.incoming/LAYOUT/verified`. The first line of that list names the boot: the list is not valid after a
   reboot, because nothing is synced. After an interruption, `begin` tells which of the interrupted parts have arrived;
   only the others are sent again.
3. `settle` sends all digests and the manifest for a check, and has the files renamed into place: all of them, or none.

Download (`download.py` and `resumable_file.py` here, `agent/job_status.py` on the machine): `get` requests a range of a
file in the manifest. Ranges arrive over several lanes. They are listed beside the content in `.partial/SHA256.parts`,
and the file gets its name once its sha256 is right.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpurun.core.records import canonical, digest_json
from gpurun.remote.archive import Codec, PackedFile, content_at

LEAST_PART_BYTES = 1 << 20
MOST_PART_BYTES = 8 << 20
MOST_SENT_BYTES = 2 * MOST_PART_BYTES + 4096
"""The maximum size of a compressed part in bytes: incompressible content grows a little."""
PART_HEAD = struct.Struct(">QII32s")
END_OF_PARTS = PART_HEAD.pack((1 << 64) - 1, 0, 0, bytes(32))
# Above this number, parts are made larger: each part costs a line on the machine, and a digest on this computer.
_MANY_PARTS = 8192
# For 16-bit tokens level 3 makes 7 % fewer bytes and takes twice as long: slower where two cores are the limit.
_ZSTD_LEVEL = 1
_GZIP_LEVEL = 1


@dataclass(frozen=True)
class Part:
    """One part of the content, with its length and sha256."""

    index: int
    size_bytes: int
    sha256: str
    content: bytes


class Parts:
    """The parts into which some files are cut, read in order. `known` maps each read file's name to its sha256."""

    def __init__(self, files: Sequence[PackedFile], known: dict[str, str]) -> None:
        self._files = [file for file in files if file.bytes]
        self._known = known
        self._starts = []
        self.total_bytes = 0
        for file in self._files:
            self._starts.append(self.total_bytes)
            self.total_bytes += file.bytes
        self.part_bytes = part_bytes_for(self.total_bytes)
        self.count = -(-self.total_bytes // self.part_bytes)
        self.digests: list[str] = []
        self._file_digest = hashlib.sha256()
        known.update({file.name: hashlib.sha256().hexdigest() for file in files if not file.bytes})
        # The layout includes the stamps: other content with the same names and sizes is another pack.
        stamps = [hashlib.sha256(f.source).hexdigest() if isinstance(f.source, bytes) else f.seen for f in files]
        named = [[file.name, file.bytes] for file in files]
        self.layout = canonical({"v": 1, "part_bytes": self.part_bytes, "files": named, "stamps": digest_json(stamps)})
        self.layout_sha256 = hashlib.sha256(self.layout).hexdigest()

    def read(self, index: int) -> Part:
        """Return one part; none may be skipped. Raise UsageError `pack.changed` if a file differs from the survey."""
        if index > len(self.digests):
            raise ValueError(f"part {index} is read before part {len(self.digests)}")
        pieces = [(file, offset, content_at(file, offset, size)) for file, offset, size in self._find_ranges(index)]
        content = pieces[0][2] if len(pieces) == 1 else b"".join(piece for _, _, piece in pieces)
        sha256 = hashlib.sha256(content).hexdigest()
        if index == len(self.digests):
            self.digests.append(sha256)
            for file, offset, piece in pieces:
                self._add_to_digest(file, offset, piece)
        return Part(index, len(content), sha256, content)

    def size_of(self, index: int) -> int:
        """Return the length of a part in bytes."""
        return min(self.part_bytes, self.total_bytes - index * self.part_bytes)

    def _add_to_digest(self, file: PackedFile, offset: int, piece: bytes) -> None:
        """Add the next piece of a file to the file's own digest."""
        if offset == 0:
            self._file_digest = hashlib.sha256()
        self._file_digest.update(piece)
        if offset + len(piece) == file.bytes:
            self._known[file.name] = self._file_digest.hexdigest()

    def _find_ranges(self, index: int) -> Iterator[tuple[PackedFile, int, int]]:
        """Yield the ranges of files that form a part: the file, the offset in the file, and the number of bytes."""
        start = index * self.part_bytes
        end, place = start + self.size_of(index), bisect_right(self._starts, start) - 1
        while start < end:
            file = self._files[place]
            size = min(end, self._starts[place] + file.bytes) - start
            yield file, start - self._starts[place], size
            start, place = start + size, place + 1


def part_bytes_for(total_bytes: int) -> int:
    """Return how many bytes each part of a pack has.

    Parts are small, because an interruption loses those being sent. They are larger if there would be very many.
    """
    size = LEAST_PART_BYTES
    while size < MOST_PART_BYTES and total_bytes > size * _MANY_PARTS:
        size *= 2
    return size


def compress_part(content: bytes, codec: Codec) -> bytes:
    """Return the compressed content of a part. Several threads may call this in parallel."""
    if codec == "gzip":
        return gzip.compress(content, _GZIP_LEVEL, mtime=0)
    import zstandard

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(content)
