"""Lets a machine pull staged or public files: sends it URLs over SSH, and checks its reports.

The package's docstring has the protocol.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from gpurun.core.records import canonical
from gpurun.core.run_plan import PublicFile
from gpurun.remote.chunks import MOST_PART_BYTES
from gpurun.remote.interface import FarRefusal, Sink
from gpurun.remote.machine_facts import Count, Sha256
from gpurun.remote.messages import MOST_LINE_BYTES, No, parse_message, refusal_in
from gpurun.remote.s3.objects import data_key
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.staged_files import StagedFile

SIGNED_S = 3600.0
MOST_PARTS_AT_ONCE = 100_000
"""The maximum number of parts in one order: the agent accepts an order of at most 32 MiB."""
MOST_FRESH = 5
"""How often the files that are still missing are ordered, each time with fresh URLs."""


_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class NotPulled(BaseModel):
    """A file that the machine could not pull, and why: expired, denied, absent, altered, no_ranges, unreachable."""

    model_config = _STRICT

    sha256: Sha256
    code: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
    message: Annotated[str, Field(max_length=500)]


class _Line(BaseModel):
    """One line of progress, or the last line, which has `pulled` and `failed`."""

    model_config = _STRICT

    bytes: Count
    pulled: Annotated[tuple[Sha256, ...], Field(max_length=100_000)] | None = None
    failed: Annotated[tuple[NotPulled, ...], Field(max_length=100_000)] = ()
    error: No | None = None


class AsksForPull(Protocol):
    """The part of a `FarSide` that pulling needs."""

    def ask(
        self, verb: str, *options: str, stdin: Iterable[bytes], sink: Sink, site: bool, timeout_s: float
    ) -> tuple[bytes, bytes]:
        """Call the agent once, and pass its reply to the sink."""
        ...


@dataclass
class PullResult:
    """The result of pulling: digests of `files` that arrived, reasons why others `failed`, and bytes transferred.

    `missing_bytes` is the total size of the files that have not arrived.
    """

    files: set[str] = field(default_factory=set)
    failed: dict[str, NotPulled] = field(default_factory=dict)
    sent_bytes: int = 0
    missing_bytes: int = 0


def have_pulled(
    far: AsksForPull, bucket: Bucket, files: Sequence[StagedFile], came: PullResult, *,
    on_progress: Callable[[], None], timeout_s: float,
) -> None:  # fmt: skip
    """Let the machine pull files, with fresh URLs if some have expired. Add the results of all calls to `came`.

    `on_progress` is called about twice a second; an exception ends the pulling. Raise FarRefusal (`disk_full` and
    others), MachineLost, or SetupError if no URL can be made.
    """
    for _ in range(MOST_FRESH):
        came.failed = {}
        for some in _divide_into_orders({file.sha256: file for file in files if file.sha256 not in came.files}):
            order = {"v": 1, "files": [_build_entry(bucket, file) for file in some]}
            _send_order(far, order, {file.sha256 for file in some}, came, on_progress, timeout_s)
        if not any(refusal.code == "expired" for refusal in came.failed.values()):
            return


def have_downloaded(
    far: AsksForPull, files: Sequence[PublicFile], origin: str, came: PullResult, *, on_progress: Callable[[], None],
    timeout_s: float,
) -> None:  # fmt: skip
    """Let the machine download public files, and add the result to `came`. `origin` is the hub that the user named.

    Raises the same errors as `have_pulled`.
    """
    came.failed = {}
    missing = {file.sha256: file for file in files if file.sha256 not in came.files}
    sizes = {"part_bytes": MOST_PART_BYTES, "codec": "none", "parts": None}
    entries = [{"sha256": part.sha256, "bytes": part.bytes, **sizes, "url": part.url} for part in missing.values()]
    _send_order(far, {"v": 1, "origin": origin, "files": entries}, set(missing), came, on_progress, timeout_s)


def _divide_into_orders(files: dict[str, StagedFile]) -> Iterator[list[StagedFile]]:
    """Divide the files into groups, one for each order. An order has at most MOST_PARTS_AT_ONCE parts, or one file."""
    batch: list[StagedFile] = []
    for file in files.values():
        if batch and sum(len(entry.sent) for entry in [*batch, file]) > MOST_PARTS_AT_ONCE:
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch


def _send_order(
    far: AsksForPull, order: dict[str, object], requested: set[str], came: PullResult, on_progress: Callable[[], None],
    timeout_s: float,
) -> None:  # fmt: skip
    """Send one order, for the files with the digests in `requested`, and add its result to `came`."""
    content = canonical(order)
    digest, before_bytes = hashlib.sha256(content).hexdigest(), came.sent_bytes

    def on_line() -> None:
        came.sent_bytes = before_bytes + progress.bytes
        on_progress()

    progress = _Progress(on_line)
    try:
        far.ask("pull", "--sha256", digest, stdin=[content], sink=progress, site=True, timeout_s=timeout_s)
    finally:
        came.sent_bytes = before_bytes + progress.bytes
    last = progress.last()
    came.files |= requested & set(last.pulled or ())
    came.failed |= {refusal.sha256: refusal for refusal in last.failed if refusal.sha256 in requested}


def _build_entry(bucket: Bucket, file: StagedFile) -> dict[str, object]:
    url = bucket.url_to_get(data_key(bucket, file.sha256), SIGNED_S).reveal()
    parts = list(zip(file.sent, file.digests, strict=True))
    sizes = {"bytes": file.bytes, "part_bytes": file.part_bytes}
    return {"sha256": file.sha256, **sizes, "codec": "zstd", "parts": parts, "url": url}


class _Progress:
    """Receives the reply to an order: reports the lines of progress, and keeps the last line."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self.line = bytearray()
        self.bytes = 0
        self._rest = bytearray()
        self._has_line = False
        self._last: _Line | None = None
        self._on_progress = on_progress

    def __call__(self, block: bytes) -> None:
        self._rest += block
        while b"\n" in self._rest:
            line, _, self._rest = self._rest.partition(b"\n")
            if self._has_line:
                self._take_line(bytes(line))
            else:
                self.line, self._has_line = line, True
        if len(self._rest) > MOST_LINE_BYTES:
            raise FarRefusal("nonsense", f"The instance sent {len(self._rest)} bytes without a line end.")

    def _take_line(self, line: bytes) -> None:
        progress = parse_message(_Line, line)
        self.bytes = max(self.bytes, progress.bytes)
        if progress.error is not None:
            raise FarRefusal(progress.error.code, progress.error.message, needed_bytes=progress.error.needed_bytes)
        if progress.pulled is not None:
            self._last = progress
        self._on_progress()

    def last(self) -> _Line:
        """Return the last line. Raise FarRefusal if there was none."""
        if self._last is None:
            refusal = refusal_in(bytes(self.line)) if self._has_line else None
            raise refusal or FarRefusal("cut_stream", "The instance stopped answering while it pulled the shards.")
        return self._last
