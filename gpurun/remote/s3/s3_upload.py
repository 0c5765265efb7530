"""Uploads one file to a bucket: reads, compresses and sends at the same time, and continues after interruptions."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.core.errors import SetupError, VerificationFailed
from gpurun.core.filelock import exclusive
from gpurun.core.paths import make_private
from gpurun.core.records import canonical
from gpurun.remote.archive import PackedFile
from gpurun.remote.chunks import Parts, compress_part
from gpurun.remote.s3.objects import Index, data_key, find_staged, index_key
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_errors import BucketLost

PIECE_BYTES = 8 << 20
"""The size of every piece except the last. S3 accepts none below 5 MiB, and R2 requires one size for all."""
AT_ONCE = 4


@dataclass(frozen=True)
class FileDigests:
    """The sha256 of a file and of each of its parts, as they were when the file was read on this computer."""

    sha256: str
    part_bytes: int
    parts: tuple[str, ...]


def digests_of(file: PackedFile, raise_if_stopped: Callable[[], None]) -> FileDigests:
    """Read a file once, for its digests. Raise UsageError `pack.changed` if it differs from the surveyed file."""
    known: dict[str, str] = {}
    parts = Parts([file], known)
    for index in range(parts.count):
        parts.read(index)
        raise_if_stopped()
    return FileDigests(known[file.name], parts.part_bytes, tuple(parts.digests))


def stage_file(
    bucket: Bucket, file: PackedFile, digests: FileDigests, notes: Path, on_sent: Callable[[int], None]
) -> Index:
    """Return the index of a file after uploading it to the bucket. Existing content is not sent again.

    `notes` is a folder for state that must survive a crash: the next call continues with the existing pieces. `on_sent`
    is called with the bytes of each sent piece, on any thread, and with 0 while another run sends the same file. An
    exception of it ends the upload.
    """
    make_private(notes)
    # If two runs have the same shards, the second one finds them in the bucket.
    with exclusive(notes / f"{digests.sha256}.lock", meanwhile=lambda: on_sent(0)):
        index = find_staged(bucket, digests.sha256, file.bytes)
        if index is None:
            index = _Sending(bucket, file, digests, notes / f"{digests.sha256}.pieces", on_sent).send()
        (notes / f"{digests.sha256}.pieces").unlink(missing_ok=True)
    return index


class _Sending:
    """One file being uploaded. `notes` has lines for the upload, for each existing piece, and for the end."""

    def __init__(
        self, bucket: Bucket, file: PackedFile, digests: FileDigests, notes: Path, on_sent: Callable[[int], None]
    ) -> None:
        self._bucket = bucket
        self._file = file
        self._digests = digests
        self._notes = notes
        self._key, self._on_sent = data_key(bucket, digests.sha256), on_sent
        self._parts = Parts([file], {})
        self._there: dict[int, tuple[str, str]] = {}
        self._tags: dict[int, str] = {}
        self._upload = ""
        self._noting = threading.Lock()

    def send(self) -> Index:
        """Send what is missing, and then the index."""
        sent = self._recall_sent_pieces() or self._send_pieces()
        head, digests = self._bucket.head(self._key), self._digests
        if head is None or head.bytes != sum(sent):
            raise BucketLost(f"{self._bucket.endpoint} has not kept all of {self._file.name}.")
        index = Index(sha256=digests.sha256, bytes=self._file.bytes, part_bytes=digests.part_bytes, sent=tuple(sent),
                      etag=head.etag)  # fmt: skip
        self._bucket.put(index_key(self._bucket, digests.sha256), canonical(index.model_dump(mode="json")))
        return index

    def _send_pieces(self) -> list[int]:
        """Compress each part and send the result in pieces of one size. Return the compressed size of each part."""
        sent: list[int] = []
        rest, waiting = bytearray(), set[Future[None]]()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for index in range(self._parts.count):
                    data = compress_part(self._parts.read(index).content, "zstd")
                    sent.append(len(data))
                    rest += data
                    while len(rest) > PIECE_BYTES:
                        waiting.add(self._submit(pool, bytes(rest[:PIECE_BYTES])))
                        del rest[:PIECE_BYTES]
                        waiting = self._wait_for_pieces(waiting, most=AT_ONCE)
                waiting.add(self._submit(pool, bytes(rest), is_last=True))
                self._wait_for_pieces(waiting, most=0)
            except BaseException:
                for piece in waiting:
                    piece.cancel()
                raise
        if tuple(self._parts.digests) != self._digests.parts:
            what = f"{self._file.name} changed while it was being staged."
            raise VerificationFailed(
                "pack.changed", what, hint="Wait until the file is complete, then run the command again."
            )
        if self._upload:
            self._write_note({"whole": sent})
            self._bucket.finish(self._key, self._upload, self._tags)
        return sent

    def _submit(self, pool: ThreadPoolExecutor, content: bytes, *, is_last: bool = False) -> Future[None]:
        """Start to send the next piece. A file of a single piece needs no multipart upload."""
        if is_last and not self._upload:
            return pool.submit(self._put_whole, content)
        if not self._upload:
            self._upload = self._bucket.begin(self._key)
            self._write_note({"upload": self._upload, "key": self._key, "bucket": self._bucket.address.bucket})
        number = len(self._tags) + 1
        self._tags[number] = ""
        return pool.submit(self._put_piece, number, content)

    def _put_whole(self, content: bytes) -> None:
        self._on_sent(0)
        self._bucket.put(self._key, content)
        self._on_sent(len(content))

    def _put_piece(self, number: int, content: bytes) -> None:
        """Send a piece, unless the same piece exists: another zstd version may have made a different one."""
        self._on_sent(0)
        sha256 = hashlib.sha256(content).hexdigest()
        there_sha256, tag = self._there.get(number, ("", ""))
        if there_sha256 != sha256:
            tag = self._bucket.put_piece(self._key, self._upload, number, content)
            self._write_note({"number": number, "sha256": sha256, "etag": tag})
            self._on_sent(len(content))
        self._tags[number] = tag

    def _wait_for_pieces(self, waiting: set[Future[None]], most: int) -> set[Future[None]]:
        """Wait until at most `most` pieces are being sent. Raise the error of any piece."""
        while len(waiting) > most:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for piece in done:
                piece.result()
        return waiting

    def _write_note(self, line: dict[str, Any]) -> None:
        with self._noting, self._notes.open("a") as notes:
            notes.write(json.dumps(line) + "\n")

    def _recall_sent_pieces(self) -> list[int]:
        """Prepare to continue an interrupted upload: note the pieces that S3 has with the recorded tag.

        Return the compressed size of each part if all pieces were joined before, and only the reply was lost; else an
        empty list.
        """
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        noted = [found for line in lines if isinstance(found := _parse_note(line), dict)]
        place = (self._key, self._bucket.address.bucket)
        begun = [record for record in noted if (record.get("key"), record.get("bucket")) == place]
        there: dict[int, str] | None = None
        with suppress(SetupError):  # Without permission to list the pieces, all are sent again.
            there = self._bucket.pieces(self._key, str(begun[-1]["upload"])) if begun else None
        if there is None:
            ends = [list(record["whole"]) for record in noted if "whole" in record]
            if begun and ends and self._is_there(ends[-1]):
                return ends[-1]
            self._notes.unlink(missing_ok=True)
            return []
        self._upload = str(begun[-1]["upload"])
        pieces = {record["number"]: (record["sha256"], record["etag"]) for record in noted if "number" in record}
        self._there = {number: piece for number, piece in pieces.items() if there.get(number) == piece[1]}
        return []

    def _is_there(self, sent: list[int]) -> bool:
        """Return whether the object exists with the total size of these parts."""
        head = self._bucket.head(self._key)
        return len(sent) == self._parts.count and head is not None and head.bytes == sum(sent)


def _parse_note(line: str) -> Any:
    """Parse a line of the notes; None if a crash has cut it off."""
    try:
        return json.loads(line)
    except ValueError:
        return None
