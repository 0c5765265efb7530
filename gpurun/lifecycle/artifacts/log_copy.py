"""Copy the trainer's events and log while they grow on the machine, byte for byte up to a size limit.

The length of a copy is the offset of the next read, so a crash or a lost connection neither loses nor doubles bytes.
When a copy reaches its limit, everything after its first half is dropped, so that the disk does not fill. New bytes are
then appended to that first half.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from gpurun.core.clock import Clock
from gpurun.core.errors import StoreFull
from gpurun.core.journal_records import RunState
from gpurun.core.paths import RunFolder, open_regular, read_regular, write_atomic
from gpurun.core.untrusted import read_object
from gpurun.remote.client import FarSide, Poll
from gpurun.remote.interface import MachineLost

MOST_BYTES = 1 << 30
HEAD_BYTES = MOST_BYTES // 2
# How many bytes of each file one call requests.
MOST_ASKED_BYTES = 4 << 20
LEAST_ASKED_BYTES = 64 << 10
MOST_DRAIN_S = 120.0
_LEAST_DRAIN_BYTES, _SHARE = 64 << 20, 4


def resume_offset(path: Path, offset: int) -> int:
    """Return where a reader of a copy resumes: at its offset, or after the head if the copy is shorter now."""
    try:
        size = path.stat().st_size
    except OSError:
        return offset
    return offset if offset <= size else min(size, HEAD_BYTES)


class LocalCopy:
    """One copied file. `NAME.cut` beside it contains how many bytes of the original were dropped after the head."""

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES, head_bytes: int = HEAD_BYTES) -> None:
        self.path = path
        self._cut = path.with_name(f"{path.name}.cut")
        self._most_bytes = most_bytes
        self._head_bytes = head_bytes

    @property
    def offset(self) -> int:
        """Return how many bytes of the original were read, including those that were dropped later."""
        return self._size() + self.dropped_bytes

    @property
    def dropped_bytes(self) -> int:
        """Return how many bytes were dropped from this copy."""
        try:
            return int(read_regular(self._cut))
        except FileNotFoundError:
            return 0

    def append(self, chunk: bytes) -> None:
        """Append a chunk; if the copy would exceed its limit, drop everything after the head first.

        Raise StoreFull if the copy cannot be written. The bytes that fitted stay in the copy and count in `offset`.
        """
        if not chunk:
            return
        try:
            if self._size() + len(chunk) > self._most_bytes:
                self._drop_tail()
            with self.path.open("ab") as out:
                out.write(chunk)
        except OSError as error:
            raise StoreFull(
                "watch.disk_full",
                f"{self.path.name} cannot be written: {error.strerror}.",
                hint="Free some disk space here: gpurun then continues. Training continues until its lease ends.",
            ) from None

    def _drop_tail(self) -> None:
        """Drop everything after the head. Truncate before noting it: a crash in between only repeats that read."""
        dropped = self.dropped_bytes + max(0, self._size() - self._head_bytes)
        if self._size() > self._head_bytes:
            os.truncate(self.path, self._head_bytes)
        write_atomic(self._cut, str(dropped).encode("ascii"))

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


def bytes_before(state: RunState) -> dict[str, int]:
    """Return, for each copy, how many of its bytes are from earlier machines of the run."""
    return {"events.jsonl": state.events_before, "trainer.log": state.log_before}


def end_lines(folder: RunFolder) -> dict[str, int]:
    """End the last line of both copies, and return their lengths.

    A lost machine may have left half a line; the next machine's output must start on a new line. Raise OSError if the
    copies cannot be written.
    """
    lengths = {}
    for name, path in (("events.jsonl", folder.events), ("trainer.log", folder.log)):
        copy = LocalCopy(path)
        if path.exists() and path.stat().st_size and not _ends_a_line(path):
            with path.open("ab") as out:
                out.write(b"\n")
        lengths[name] = copy.offset
    return lengths


def _ends_a_line(path: Path) -> bool:
    with open_regular(path) as content:
        content.seek(-1, os.SEEK_END)
        return content.read(1) == b"\n"


class Tail:
    """Fetches the new part of events and log. After a call that fails, the next one requests fewer bytes."""

    def __init__(self, far: FarSide, folder: RunFolder, *, before: Mapping[str, int] | None = None) -> None:
        """`before` has, for each copy, how many of its bytes are from earlier machines of the run."""
        self._far, self._before = far, before or {}
        self._copies = {"events.jsonl": LocalCopy(folder.events), "trainer.log": LocalCopy(folder.log)}
        self._most_bytes = MOST_ASKED_BYTES

    def bring(self) -> Poll:
        """Fetch the next chunks, append them to the copies, and return the agent's reply."""
        try:
            offsets = {name: (copy.offset - self._before.get(name, 0)) for name, copy in self._copies.items()}
            poll = self._far.poll({name: (max(0, offset), self._most_bytes) for name, offset in offsets.items()})
        except MachineLost:
            self._most_bytes = max(LEAST_ASKED_BYTES, self._most_bytes // 4)
            raise
        self._most_bytes = min(MOST_ASKED_BYTES, 2 * self._most_bytes)
        for name, chunk in poll.chunks.items():
            self._copies[name].append(chunk.data)
        return poll


class Drain:
    """Limits how much of events and log is still fetched after the trainer has ended.

    The limit is a quarter of the plan's `collect_s` and `home_bytes`, because the checkpoints need the rest. A limit is
    needed because the machine is billed during the fetch and may report wrong sizes. The time when training ended and
    the bytes copied until then are noted beside the copies, so that a later process does not start the limit again.
    """

    def __init__(self, folder: RunFolder, clock: Clock, collect_s: float, home_bytes: int) -> None:
        self._note, self._clock = folder.path / "drain.json", clock
        self._most_s = min(MOST_DRAIN_S, collect_s / _SHARE)
        self._most_bytes = max(_LEAST_DRAIN_BYTES, home_bytes // _SHARE)

    def begin(self) -> None:
        """Forget the end of an earlier training, because a new training begins."""
        self._note.unlink(missing_ok=True)

    def may_continue(self, poll: Poll) -> bool:
        """Return whether there is more to fetch and the limit allows it. The first call notes the end of training."""
        here = sum(chunk.offset + len(chunk.data) for chunk in poll.chunks.values())
        if (noted := self._read_note()) is None:
            noted = self._clock.wall(), here
            write_atomic(self._note, json.dumps({"ended_wall": noted[0], "bytes": here}).encode())
        ended_wall, by_then = noted
        is_paid_for = self._clock.wall() - ended_wall < self._most_s and here - by_then < self._most_bytes
        return is_paid_for and any(is_behind(poll, name) for name in poll.chunks)

    def record(self) -> dict[str, object]:
        """Return a record's field with the seconds since training ended; empty if it is less than one second."""
        noted = self._read_note()
        spent_s = self._clock.wall() - noted[0] if noted else 0.0
        return {"drained_s": round(spent_s, 3)} if spent_s >= 1 else {}

    def _read_note(self) -> tuple[float, int] | None:
        try:
            noted = read_object(self._note)
            return float(noted["ended_wall"]), int(noted["bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def left(self, poll: Poll) -> str:
        """Return a phrase about the bytes that remain on the machine; "" if none remain."""
        sizes = {name: chunk.size - chunk.offset - len(chunk.data) for name, chunk in poll.chunks.items() if chunk.data}
        return " and ".join(f"{size:,} bytes of {name}" for name, size in sorted(sizes.items()) if size > 0)


def is_behind(poll: Poll, name: str) -> bool:
    """Return whether more of a file can be fetched now."""
    chunk = poll.chunks[name]
    return bool(chunk.data) and chunk.offset + len(chunk.data) < chunk.size
