"""Bringing one file to the bucket: read, compressed and sent at the same time, in pieces that a cut does not undo."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpurun.core.errors import SetupError, VerificationFailed
from gpurun.core.exclusive import exclusive
from gpurun.core.model import canonical
from gpurun.core.paths import make_private
from gpurun.machine.bucket.objects import Index, data_key, find, index_key
from gpurun.machine.bucket.trouble import BucketLost
from gpurun.machine.bucket.wire import Bucket
from gpurun.machine.pack import PackedFile
from gpurun.machine.parts import Parts
from gpurun.machine.squeeze import Squeeze

PIECE_BYTES = 8 << 20
LEAST_PIECE_BYTES = 5 << 20
"""S3 takes no smaller piece, but for the last one."""
AT_ONCE = 4


@dataclass(frozen=True)
class Digests:
    """A file as it was read here: its sha256, and that of each of its parts."""

    sha256: str
    part_bytes: int
    parts: tuple[str, ...]


def digests_of(file: PackedFile, heed: Callable[[], None]) -> Digests:
    """Read a file once; UsageError `pack.changed` when it is not the file of the survey."""
    known: dict[str, str] = {}
    parts = Parts([file], known)
    for index in range(parts.count):
        parts.read(index)
        heed()
    return Digests(known[file.name], parts.part_bytes, tuple(parts.digests))


def stage_file(
    bucket: Bucket, file: PackedFile, digests: Digests, notes: Path, on_sent: Callable[[int], None]
) -> Index:
    """The index of a file that is in the bucket now; what was there already is not sent again.

    `notes` is a folder for what must outlive a crash: the next call goes on with the pieces that are there. `on_sent`
    is told the bytes of each piece that went out, on any thread; what it raises ends the sending.
    """
    make_private(notes)
    with exclusive(notes / f"{digests.sha256}.lock"):  # Two runs with the same shards: the second finds them there.
        index = find(bucket, digests.sha256, file.bytes)
        if index is None:
            index = _Sending(bucket, file, digests, notes / f"{digests.sha256}.pieces", on_sent).send()
        (notes / f"{digests.sha256}.pieces").unlink(missing_ok=True)
    return index


@dataclass
class _Piece:
    """Some parts that follow one another, as one piece of the object: their sizes as sent."""

    first: int
    sent: list[int] = field(default_factory=list)
    etag: str = ""

    @property
    def number(self) -> int:
        """Its number in the upload: numbers may have gaps, so that a piece keeps its own over a restart."""
        return self.first + 1


class _Sending:
    """One file on its way; `notes` has a line for the upload and one for each piece that is there."""

    def __init__(
        self, bucket: Bucket, file: PackedFile, digests: Digests, notes: Path, on_sent: Callable[[int], None]
    ) -> None:
        self._bucket, self._file, self._digests, self._notes = bucket, file, digests, notes
        self._key, self._on_sent = data_key(bucket, digests.sha256), on_sent
        self._squeeze, self._parts = Squeeze("zstd"), Parts([file], {})
        self._pieces: dict[int, _Piece] = {}
        self._upload = ""
        self._noting = threading.Lock()

    def send(self) -> Index:
        """Send what is missing, then the index."""
        self._recall()
        waiting: set[Future[None]] = set()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                at = 0
                while at < self._parts.count:
                    at = self._next(at, pool, waiting)
                    waiting = self._settled(waiting, most=AT_ONCE)
                self._settled(waiting, most=0)
            except BaseException:
                for one in waiting:
                    one.cancel()
                raise
        if tuple(self._parts.digests) != self._digests.parts:
            what = f"{self._file.name} changed while it was being staged."
            raise VerificationFailed("pack.changed", what, hint="Wait until it is written whole, then run it again.")
        if self._upload:
            self._bucket.finish(self._key, self._upload, {p.number: p.etag for p in self._pieces.values()})
        sent = [size for _, piece in sorted(self._pieces.items()) for size in piece.sent]
        head, digests = self._bucket.head(self._key), self._digests
        if head is None or head.bytes != sum(sent):
            raise BucketLost(f"{self._bucket.endpoint} has not kept all of {self._file.name}.")
        index = Index(sha256=digests.sha256, bytes=self._file.bytes, part_bytes=digests.part_bytes, sent=tuple(sent),
                      etag=head.etag)  # fmt: skip
        self._bucket.put(index_key(self._bucket, digests.sha256), canonical(index.model_dump(mode="json")))
        return index

    def _next(self, at: int, pool: ThreadPoolExecutor, waiting: set[Future[None]]) -> int:
        """Pass over a piece that is there, or read and compress the next one and have it sent; where to go on."""
        if at in self._pieces:
            for index in range(at, end := at + len(self._pieces[at].sent)):
                self._parts.read(index)
            return end
        piece, content = _Piece(at), bytearray()
        while at < self._parts.count and len(content) < PIECE_BYTES:
            if at in self._pieces and len(content) >= LEAST_PIECE_BYTES:
                break
            self._pieces.pop(at, None)  # The gap before it is too small for a piece: it is sent once more.
            data = self._squeeze.squeezed(self._parts.read(at).content)
            content += data
            piece.sent.append(len(data))
            at += 1
        is_all = piece.first == 0 and at == self._parts.count
        self._pieces[piece.first] = piece
        if not is_all and not self._upload:
            self._upload = self._bucket.begin(self._key)
            self._note({"upload": self._upload, "key": self._key, "bucket": self._bucket.address.bucket})
        waiting.add(pool.submit(self._put, piece, bytes(content)))
        return at

    def _put(self, piece: _Piece, content: bytes) -> None:
        self._on_sent(0)
        if self._upload:
            piece.etag = self._bucket.put_piece(self._key, self._upload, piece.number, content)
            self._note({"first": piece.first, "sent": piece.sent, "etag": piece.etag})
        else:
            piece.etag = self._bucket.put(self._key, content)
        self._on_sent(len(content))

    def _settled(self, waiting: set[Future[None]], most: int) -> set[Future[None]]:
        """Wait until no more than so many are under way; raise what went wrong with one."""
        while len(waiting) > most:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()
        return waiting

    def _note(self, line: dict[str, Any]) -> None:
        with self._noting, self._notes.open("a") as notes:
            notes.write(json.dumps(line) + "\n")

    def _recall(self) -> None:
        """Take up an upload that was cut: those of its pieces that S3 has with the tag that was noted."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        noted = [found for line in lines if isinstance(found := _read(line), dict)]
        place = (self._key, self._bucket.address.bucket)
        begun = [one for one in noted if (one.get("key"), one.get("bucket")) == place]
        there: dict[int, str] | None = None
        with suppress(SetupError):  # Who may not list what is there sends it again.
            there = self._bucket.pieces(self._key, str(begun[-1]["upload"])) if begun else None
        pieces = [_Piece(one["first"], one["sent"], one["etag"]) for one in noted if "first" in one]
        if there is None:
            if begun and self._is_finished(pieces):
                return
            self._notes.unlink(missing_ok=True)
            return
        self._upload = str(begun[-1]["upload"])
        self._take_up([piece for piece in pieces if there.get(piece.number) == piece.etag])

    def _is_finished(self, pieces: list[_Piece]) -> bool:
        """Whether all pieces were put together already, and only that was not heard any more."""
        self._take_up(pieces)
        head = self._bucket.head(self._key)
        sent = [size for piece in self._pieces.values() for size in piece.sent]
        if len(sent) == self._parts.count and head is not None and head.bytes == sum(sent):
            return True
        self._pieces = {}
        return False

    def _take_up(self, pieces: list[_Piece]) -> None:
        """Count these pieces as there, but for such as overlap."""
        taken_to = 0
        for first, piece in sorted({piece.first: piece for piece in pieces}.items()):
            if first >= taken_to:
                self._pieces[first], taken_to = piece, first + len(piece.sent)


def _read(line: str) -> Any:
    """A line of the notes; None where a crash has cut it."""
    try:
        return json.loads(line)
    except ValueError:
        return None
