"""Uploads a pack to a machine: in parts, over several parallel lanes, and only the parts that it does not have.

`chunks.py` has the protocol.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from gpurun.core.clock import Clock, SystemClock
from gpurun.core.records import canonical
from gpurun.remote.archive import Codec, Pack, PackedFile, demand_unchanged, read_blocks
from gpurun.remote.chunks import END_OF_PARTS, PART_HEAD, Part, Parts, compress_part
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import BeginAnswer, Received, Shipped, parse_message

# Two lanes use two cores, however short the round trip is.
LEAST_LANES = 2
# A lane that has no next part for this long ends its stream. The machine waits longer than this.
IDLE_S = 20.0
TICK_S = 0.05
QUICK_S = 60.0
# A lane that failed this often before it had sent a part is not tried again.
MOST_FRUITLESS = 3
# Refusals after which a lane tries again.
_AGAIN = frozenset({"cut_stream", "wrong_digest"})
_LINE = re.compile(rb"([0-9a-f]{1,64}) ([0-9a-f]{1,64})")

T = TypeVar("T")


class Asks(Protocol):
    """The part of a `FarSide` that uploads need."""

    def ask(
        self,
        verb: str,
        *options: str,
        stdin: Iterable[bytes] | None = None,
        site: bool = False,
        timeout_s: float = QUICK_S,
    ) -> tuple[bytes, bytes]:
        """Call the agent once. Return the JSON line of its reply, and the raw bytes after that line."""
        ...

    def lanes(self, most: int, *, least: int = 1) -> Sequence[Asks]:
        """Return lanes for parallel use; this one is the first."""
        ...

    def close_lanes(self) -> None:
        """Close the connections that `lanes` has made."""
        ...

    def close(self) -> None:
        """Close every connection. Running calls fail, and the next call makes a new connection."""
        ...


def send_pack(
    far: Asks,
    pack: Pack,
    codec: Codec,
    *,
    on_progress: Callable[[int], None] | None = None,
    timeout_s: float,
    clock: Clock | None = None,
) -> Shipped:
    """Send the files that the machine lacks. Afterwards all files are in place and verified there, or none is.

    `on_progress` is called, on this thread, with the content bytes that the machine has or that were sent. An exception
    of it ends the upload.
    """
    pack.survey.demand_clean()
    upload = _Upload(far, pack, codec, on_progress, clock or SystemClock(), timeout_s)
    held = upload.begin(Parts(pack.survey.files, pack.known), "ask")
    if held:
        upload.begin(Parts(_list_missing_files(pack, held), pack.known), "settled")
    upload.send_parts()
    return upload.settle()


def _list_missing_files(pack: Pack, held: set[str]) -> list[PackedFile]:
    """Return the files whose sha256 is not in `held`. Files whose sha256 is unknown are read for it."""
    for file in pack.survey.files:
        if file.name not in pack.known:
            digest = hashlib.sha256()
            for block in read_blocks(file):
                digest.update(block)
            pack.known[file.name] = digest.hexdigest()
    return [file for file in pack.survey.files if pack.known[file.name] not in held]


class _Stopped(Exception):
    """Ends the work of the lanes when this process has ended the upload; caught in this module."""


class _Upload:
    """The upload of one pack's parts, and the threads that send them: one for each lane."""

    def __init__(
        self,
        far: Asks,
        pack: Pack,
        codec: Codec,
        on_progress: Callable[[int], None] | None,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._far = far
        self._pack = pack
        self._codec = codec
        self._on_progress = on_progress
        self._clock, self._end_mono = clock, clock.monotonic() + timeout_s
        self._reading, self._counting = threading.Lock(), threading.Lock()
        self._there: dict[int, str] = {}
        self._todo: deque[int] = deque()
        self._unsure: list[int] = []  # Parts that were sent and may not have arrived.
        self._is_stopped = False
        self._error: BaseException | None = None
        self._trouble: Exception | None = None

    def begin(self, parts: Parts, held: str) -> set[str]:
        """Announce these parts. Return the digests of complete files that the machine already has.

        If it has some, the parts of the other files must be announced before any is sent. If it has none, this object
        now knows which parts the machine has.
        """
        self._parts, self._todo = parts, deque(range(parts.count))
        self._held_bytes = self._pack.survey.total_bytes - parts.total_bytes
        self._pack.content_bytes = max(self._pack.content_bytes, self._held_bytes)
        begun, lines = self._ask_and_report(lambda: self._announce(held))
        if begun.kind == "held":
            return {digest.decode() for digest, _ in lines}
        self._there = {int(index): sha256.decode() for index, sha256 in lines if index.isdigit()}
        if self._codec not in begun.codecs:
            self._codec = "gzip"
        return set()

    def _announce(self, held: str) -> tuple[BeginAnswer, list[tuple[bytes, bytes]]]:
        """Call `begin`, which may take minutes. Return its reply, and both words of each line that follows.

        A line has the index and the sha256 of a part, or the sha256 and the size of a file that the machine has.
        """
        options = ("--held", held, "--sha256", self._parts.layout_sha256)
        line, content = self._far.ask(
            "begin", *options, stdin=[self._parts.layout], site=True, timeout_s=self._compute_left_s()
        )
        begun = parse_message(BeginAnswer, line)
        if begun.sha256 != hashlib.sha256(content).hexdigest():
            raise FarRefusal("nonsense", "The instance's list of what it has did not arrive complete.")
        found = [_LINE.fullmatch(text) for text in content.splitlines()]
        if (begun.kind == "held") > (held == "ask" and bool(found)) or not all(found):
            raise FarRefusal("nonsense", "The instance's list of what it has is malformed.")
        return begun, [(match[1], match[2]) for match in found if match]

    def send_parts(self) -> None:
        """Send all missing parts. After an interruption, ask which of the interrupted parts have arrived.

        If no part arrived in a round, raise the error of that round.
        """
        while self._todo:
            self._send_all_parts()
            if self._error is not None:
                raise self._error
            left = sorted({*self._todo, *self._unsure})
            if left and self._trouble is not None:
                trouble, before = self._trouble, len(self._there)
                self.begin(self._parts, "settled")
                if len(self._there) <= before or self._compute_left_s() <= 0:
                    raise trouble
            self._todo = deque(left)
            self._unsure = []
            self._trouble = None
        self._pack.content_bytes = self._pack.survey.total_bytes

    def settle(self) -> Shipped:
        """Make the machine check and place all files. Raise UsageError `pack.changed` if a local file has changed."""
        begun_mono = self._clock.monotonic()
        for file in self._pack.survey.files:
            demand_unchanged(file)
        content = canonical(self._parts.digests) + b"\n" + self._pack.manifest()
        options = ("--layout", self._parts.layout_sha256, "--sha256", hashlib.sha256(content).hexdigest())
        limit_s = max(QUICK_S, self._compute_left_s())
        line, _ = self._ask_and_report(lambda: self._far.ask("settle", *options, stdin=[content], timeout_s=limit_s))
        shipped = parse_message(Shipped, line)
        if shipped.manifest_sha256 != self._pack.manifest_sha256:
            raise FarRefusal("nonsense", "The instance confirms a different pack from the one that was sent.")
        return shipped.model_copy(update={"unpack_s": round(self._clock.monotonic() - begun_mono, 3)})

    def _ask_and_report(self, ask: Callable[[], T]) -> T:
        """Return the result of `ask`, which may take minutes. Meanwhile call `on_progress` with unchanged figures."""
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:  # noqa: BLE001 - raised again below, on the caller's thread
                answer.set_exception(error)

        self._wait_for_lanes([_start_thread(work)])
        return answer.result()

    def _send_all_parts(self) -> None:
        """Let the lanes send all missing parts, and wait for the lanes."""
        lanes = [_start_thread(self._send_over, lane) for lane in self._far.lanes(len(self._todo), least=LEAST_LANES)]
        try:
            self._wait_for_lanes(lanes)
        finally:
            self._far.close_lanes()
            for thread in lanes:
                thread.join()

    def _wait_for_lanes(self, threads: list[threading.Thread]) -> None:
        """Wait for the threads' end. An exception of `on_progress` ends their work, and is raised."""
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(TICK_S)
                    if self._on_progress is not None:
                        self._on_progress(self._pack.content_bytes)
        except BaseException:
            self._is_stopped = True
            self._far.close()  # Closing a stalled connection wakes the thread that waits for it.
            raise

    def _send_over(self, lane: Asks) -> None:
        """Send parts over one lane until none is left. After an interruption, start again."""
        fruitless = 0
        while not self._is_stopped and fruitless < MOST_FRUITLESS:
            taken: list[int] = []
            try:
                part = self._take_next_part(taken)
                if part is None:
                    return
                if self._compute_left_s() <= 0:
                    raise MachineLost("There was no time left to send the rest.")
                frames, part = self._stream_frames(part, taken), None
                options = ("--sha256", self._parts.layout_sha256, "--codec", self._codec)
                line, _ = lane.ask("receive", *options, stdin=frames, site=True, timeout_s=self._compute_left_s())
                parse_message(Received, line)
            except (_Stopped, MachineLost, FarRefusal) as error:
                self._unsure.extend(taken)
                if isinstance(error, FarRefusal) and error.reason not in _AGAIN:
                    self._fail(error)
                self._trouble = error
                fruitless = fruitless + 1 if len(taken) < 2 else 0
            except BaseException as error:  # noqa: BLE001 - raised again in `send_parts`, on the caller's thread
                self._fail(error)

    def _stream_frames(self, part: Part | None, taken: list[int]) -> Iterator[bytes]:
        """Yield the stream of a lane: each part with its head, and then the end."""
        while part is not None:
            data = compress_part(part.content, self._codec)
            head = PART_HEAD.pack(part.index, part.size_bytes, len(data), bytes.fromhex(part.sha256))
            with self._counting:
                self._pack.sent_bytes += len(head) + len(data)
            part = None  # A lane that waits keeps no part in memory.
            yield head
            yield data
            part = self._take_next_part(taken, IDLE_S)
        yield END_OF_PARTS

    def _take_next_part(self, taken: list[int], wait_s: float = -1) -> Part | None:
        """Return the next missing part, and add its index to `taken`.

        Return None if no part is left, or if other lanes read for longer than `wait_s` seconds (-1: no limit).
        """
        if not self._reading.acquire(timeout=wait_s):
            return None
        try:
            while self._todo:
                if self._is_stopped:
                    raise _Stopped
                index = self._todo[0]
                part = None if self._has_part(index) else self._parts.read(index)
                self._todo.popleft()
                before_bytes = self._held_bytes + index * self._parts.part_bytes
                self._pack.content_bytes = max(self._pack.content_bytes, before_bytes)
                if part is not None and not self._has_part(index):
                    taken.append(index)
                    return part
            return None
        finally:
            self._reading.release()

    def _has_part(self, index: int) -> bool:
        """Return whether the machine has this part with the digest that was read on this computer."""
        return index < len(self._parts.digests) and self._there.get(index) == self._parts.digests[index]

    def _compute_left_s(self) -> float:
        return self._end_mono - self._clock.monotonic()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._is_stopped = True


def _start_thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread
