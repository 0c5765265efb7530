"""Parts on their way to a machine, over several lanes.

A lane is a way to the machine of its own. What a lane had under way when it was cut is asked for, and sent again if it
did not arrive; the far side keeps what it has verified, over any number of cuts and of restarts here.
"""

from __future__ import annotations

import hashlib
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from gpurun.core.clock import Clock
from gpurun.machine.answers import Begun, Received, understood
from gpurun.machine.base import FarRefusal, MachineLost
from gpurun.machine.outbox import Outbox, Stopped
from gpurun.machine.pace import Pace
from gpurun.machine.pack import Codec, Pack
from gpurun.machine.parts import Part, Parts
from gpurun.machine.settling import JOIN_S, Settling

# As long as nothing is left to send a lane is kept open; the far side gives up on it later than this.
IDLE_S = 20.0
TICK_S = 0.05
# A lane that was cut so often before it had sent a part is not tried again.
MOST_FRUITLESS = 3
QUICK_S = 60.0
# So near the end the last step is asked for: it takes some round trips until it can be told anything.
_LAST_PARTS = 64
# What a lane may be refused and try again; without a layout all is in place by now: the last part came after its cut.
_AGAIN = frozenset({"cut_stream", "wrong_digest", "no_layout"})
_HEAD = struct.Struct(">QII32s")
_END = (1 << 64) - 1
_LINE = re.compile(rb"([0-9a-f]{1,64}) ([0-9a-f]{1,64})")


T = TypeVar("T")


class Asks(Protocol):
    """A far side, as far as this needs it. `store_bytes`: how much a box that is kept may keep for the next run."""

    store_bytes: int

    def ask(
        self,
        verb: str,
        *options: str,
        stdin: Iterable[bytes] | None = None,
        site: bool = False,
        timeout_s: float = QUICK_S,
    ) -> tuple[bytes, bytes]:
        """One call of the agent: its line, and what follows."""
        ...

    def lanes(self, count: int) -> Sequence[Asks]:
        """Ways there that may be used at once, this one the first."""
        ...

    def close_lanes(self) -> None:
        """End what `lanes` has made."""
        ...

    def close(self) -> None:
        """End every connection; what is under way fails, and the next call makes a new one."""
        ...

    @property
    def round_trip_s(self) -> float:
        """How long the way there and back takes."""
        ...


def begin(far: Asks, parts: Parts, held: str, timeout_s: float) -> tuple[Begun, list[tuple[bytes, bytes]]]:
    """Say what is to come; the answer, and its lines in two words each: parts verified, or files held.

    A box that is kept may have to read all that it has, for minutes.
    """
    options = ("--held", held, "--sha256", parts.layout_sha256, "--store", str(far.store_bytes))
    line, content = far.ask("begin", *options, stdin=[parts.layout], site=True, timeout_s=timeout_s)
    begun = understood(Begun, line)
    if begun.bytes != len(content) or begun.sha256 != hashlib.sha256(content).hexdigest():
        raise FarRefusal("nonsense", "The instance's list of what it has did not arrive whole.")
    found = [_LINE.fullmatch(one) for one in content.splitlines()]
    if (begun.kind == "held") > (held == "ask" and bool(found)) or not all(found):
        raise FarRefusal("nonsense", "The instance's list of what it has is malformed.")
    return begun, [(match[1], match[2]) for match in found if match]


class Sending:
    """The parts of one pack on their way, and the threads that carry them: one for each lane.

    `held` are the files that the far side has from before: then nothing was sent, and the rest is another layout.
    `settling` is the last step, begun while the last parts are on their way.
    """

    def __init__(self, far: Asks, pack: Pack, parts: Parts, codec: Codec, clock: Clock, end_mono: float) -> None:
        self._far, self._pack, self._parts = far, pack, parts
        self._clock, self._end_mono = clock, end_mono
        self._outbox, self._pace = Outbox(pack, parts, codec), Pace(0.0)
        self.held: set[str] = set()
        self.settling = Settling(self._ask_to_settle, pack, parts)
        self._counting, self._begun = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        self._trouble: Exception | None = None

    def send(self, held: str, on_progress: Callable[[int], None] | None) -> None:
        """Send all parts that are not there; then see what became of those that were under way in a cut."""
        while True:
            self._carry(held, on_progress)
            if self.held:
                return
            if self._outbox.is_done:
                self._pack.content_bytes = self._pack.survey.total_bytes
                return
            held = "settled"

    def _begin(self, held: str, trouble: Exception | None, on_progress: Callable[[int], None] | None) -> None:
        """Learn what is there; raise the trouble of the round before when that has brought nothing further."""
        try:
            begun, lines = self._attended(lambda: begin(self._far, self._parts, held, self._left_s()), on_progress)
        except FarRefusal as refusal:
            if refusal.reason == "disk_full" and trouble is not None:
                raise trouble from refusal  # It may be in place by now, where it takes the room: who asks anew is told.
            raise
        if begun.kind == "held":
            self.held = {digest.decode() for digest, _ in lines}
            self._outbox.clear()
            return
        there = {int(index): sha256.decode() for index, sha256 in lines if index.isdigit()}
        is_more = self._outbox.learn(there, begun.codecs)
        if trouble is not None and (not is_more or self._left_s() <= 0):
            raise trouble

    def _attended(self, ask: Callable[[], T], on_progress: Callable[[int], None] | None) -> T:
        """What a call answers that may take minutes; `on_progress` hears meanwhile that nothing has moved."""
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:  # noqa: BLE001 - raised again below, on the caller's thread
                answer.set_exception(error)

        thread = _thread(work)
        while thread.is_alive():
            thread.join(TICK_S)
            if on_progress is not None:
                on_progress(self._pack.content_bytes)
        return answer.result()

    def _carry(self, held: str, on_progress: Callable[[int], None] | None) -> None:
        """Let the lanes carry what is to do, and wait for them. The first ones are opened while it is asked what is."""
        self._begun.clear()
        trouble, self._trouble = self._trouble, None
        lanes: list[threading.Thread] = []
        reader = _thread(self._read_ahead)
        try:
            self._add_lanes(lanes)
            self._begin(held, trouble, on_progress)
            self._pace.learn(self._far.round_trip_s)
            self._begun.set()
            self._wait(lanes, on_progress)
        except BaseException:
            self._outbox.stop()
            self._begun.set()
            for thread in lanes:
                thread.join(JOIN_S)
            self.settling.end()
            self._far.close()  # Whoever is stuck in a connection that has stalled is woken by its end.
            raise
        finally:
            self._far.close_lanes()
            for thread in (reader, *lanes):
                thread.join()
        if self._error is not None:
            self.settling.end()
            raise self._error

    def _wait(self, lanes: list[threading.Thread], on_progress: Callable[[int], None] | None) -> None:
        """Wait for the lanes, of which there may be more meanwhile, and have the last step begin before their end."""
        for thread in lanes:
            while thread.is_alive():
                thread.join(TICK_S)
                self._add_lanes(lanes)
                if not self.held and self._outbox.left <= _LAST_PARTS:
                    self.settling.begin()
                if on_progress is not None:
                    on_progress(self._pack.content_bytes)

    def _read_ahead(self) -> None:
        try:
            if self._outbox.read_ahead():
                self.settling.tell()
        except BaseException as error:  # noqa: BLE001 - raised again in `_carry`, on the caller's thread
            self._fail(error)

    def _add_lanes(self, lanes: list[threading.Thread]) -> None:
        """As many more lanes as the line is worth."""
        left_bytes = self._outbox.left * self._parts.part_bytes
        worth = self._pace.look(self._pack.sent_bytes, left_bytes, self._clock.monotonic())
        wanted = min(worth, max(1, self._outbox.left))
        if wanted > len(lanes):
            lanes += [_thread(self._work, lane) for lane in self._far.lanes(wanted)[len(lanes) :]]

    def _work(self, lane: Asks) -> None:
        """Carry parts over one lane, again and again where it is cut, until there are no more."""
        fruitless = 0
        while not self._outbox.is_stopped and fruitless < MOST_FRUITLESS:
            taken: list[int] = []
            try:
                part = self._outbox.next(taken) if self._begun.is_set() else None
                if part is None and self._begun.is_set():
                    return
                self._call(lane, part, taken)
            except (Stopped, MachineLost, FarRefusal) as error:
                self._outbox.doubt(taken)
                if isinstance(error, FarRefusal) and error.reason not in _AGAIN:
                    self._fail(error)
                self._trouble = error
                fruitless = fruitless + 1 if len(taken) < 2 else 0
            except BaseException as error:  # noqa: BLE001 - raised again in `_carry`, on the caller's thread
                self._fail(error)

    def _call(self, lane: Asks, part: Part | None, taken: list[int]) -> None:
        """One stream of parts, beginning with this one, or as soon as it is known what is to be sent."""
        if self._left_s() <= 0:
            raise MachineLost("There was no time left to send the rest.")
        options = ("--sha256", self._parts.layout_sha256, "--codec", self._outbox.codec)
        frames = self._frames(self._outbox.codec, part, taken)
        line, _ = lane.ask("receive", *options, stdin=frames, site=True, timeout_s=self._left_s())
        understood(Received, line)

    def _frames(self, codec: Codec, first: Part | None, taken: list[int]) -> Iterator[bytes]:
        """The stream: each part with its head, then the end."""
        self._begun.wait()
        if self._outbox.is_stopped:
            raise Stopped
        part = first or (self._outbox.next(taken) if codec == self._outbox.codec else None)
        while part is not None:
            begun_mono = self._clock.monotonic()
            data = self._outbox.squeezed(part)
            squeezed_mono = self._clock.monotonic()
            head = _HEAD.pack(part.index, part.size_bytes, len(data), bytes.fromhex(part.sha256))
            with self._counting:
                self._pack.sent_bytes += len(head) + len(data)
            was_ahead = part.squeezed is not None
            part = None  # A lane that waits for the line holds what it sends, and no more.
            yield head
            yield data
            if not was_ahead:
                self._outbox.sent(squeezed_mono - begun_mono, self._clock.monotonic() - squeezed_mono)
            part = self._outbox.next(taken, IDLE_S)
        yield _HEAD.pack(_END, 0, 0, bytes(32))
        if not self._outbox.left and not self.held:
            self.settling.tell()

    def _ask_to_settle(self, stdin: Iterable[bytes], wait_s: float) -> bytes:
        options = ("--layout", self._parts.layout_sha256, "--store", str(self._far.store_bytes), "--wait", str(wait_s))
        return self._far.ask("settle", *options, stdin=stdin, timeout_s=max(QUICK_S, self._left_s()))[0]

    def _left_s(self) -> float:
        return self._end_mono - self._clock.monotonic()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._outbox.stop()


def _thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread
