"""Sending a pack: in parts, over several lanes at once, and of it only what is not there already, verified.

A lane is a way to the machine of its own. What a lane had under way when it was cut is asked for, and sent again if it
did not arrive; the far side keeps what it has verified, over any number of cuts and of restarts here.
"""

from __future__ import annotations

import hashlib
import re
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from gpurun.core.clock import Clock, SystemClock
from gpurun.core.model import canonical
from gpurun.machine.answers import Begun, Received, Shipped, understood
from gpurun.machine.base import FarRefusal, MachineLost
from gpurun.machine.pace import Pace
from gpurun.machine.pack import Codec, Pack, PackedFile, blocks, demand_unchanged
from gpurun.machine.parts import Part, Parts
from gpurun.machine.squeeze import Squeeze

# As long as nothing is left to send a lane is kept open; the far side gives up on it later than this.
IDLE_S = 20.0
TICK_S = 0.05
JOIN_S = 2.0
# A lane that was cut so often before it had sent a part is not tried again.
MOST_FRUITLESS = 3
QUICK_S = 60.0
_HEAD = struct.Struct(">QII32s")
_END = (1 << 64) - 1
_LINE = re.compile(rb"([0-9a-f]+) ([0-9a-f]+)")


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


class _Stopped(Exception):
    """This side has ended the sending; never seen outside."""


def send(
    far: Asks,
    pack: Pack,
    codec: Codec,
    *,
    on_progress: Callable[[int], None] | None = None,
    timeout_s: float,
    clock: Clock | None = None,
) -> Shipped:
    """Send what the far side does not have; all of it is in place and verified there, or nothing of it is.

    `on_progress` is told the content bytes that are there or were sent; what it raises ends the sending.
    """
    pack.survey.demand_clean()
    clock = clock or SystemClock()
    end_mono = clock.monotonic() + timeout_s
    parts = Parts(pack.survey.files, pack.known)
    sending = Sending(far, pack, parts, codec, clock, end_mono)
    sending.send("ask", on_progress)
    if sending.held:
        parts = Parts(_not_held(pack, sending.held), pack.known)
        Sending(far, pack, parts, codec, clock, end_mono).send("settled", on_progress)
    for file in pack.survey.files:
        demand_unchanged(file)
    manifest = pack.manifest()
    content = canonical(parts.digests) + b"\n" + manifest
    all_there_mono = clock.monotonic()
    options = ("--layout", parts.layout_sha256, "--sha256", hashlib.sha256(content).hexdigest())
    line, _ = far.ask("settle", *options, "--store", str(far.store_bytes), stdin=[content],
                      timeout_s=max(QUICK_S, end_mono - clock.monotonic()))  # fmt: skip
    shipped = understood(Shipped, line)
    if shipped.manifest_sha256 != pack.manifest_sha256:
        raise FarRefusal("nonsense", "The instance says that it has taken in another pack than the one sent.")
    return shipped.model_copy(update={"unpack_s": round(clock.monotonic() - all_there_mono, 3)})


def begin(far: Asks, parts: Parts, held: str) -> tuple[Begun, list[tuple[bytes, bytes]]]:
    """Say what is to come; the answer, and its lines in two words each: parts verified, or files held."""
    options = ("--held", held, "--sha256", parts.layout_sha256, "--store", str(far.store_bytes))
    line, content = far.ask("begin", *options, stdin=[parts.layout], site=True, timeout_s=QUICK_S * 10)
    begun = understood(Begun, line)
    if begun.bytes != len(content) or begun.sha256 != hashlib.sha256(content).hexdigest():
        raise FarRefusal("nonsense", "The instance's list of what it has did not arrive whole.")
    found = [_LINE.fullmatch(one) for one in content.splitlines()]
    if (begun.kind == "held") > (held == "ask") or not all(found):
        raise FarRefusal("nonsense", "The instance's list of what it has is malformed.")
    return begun, [(match[1], match[2]) for match in found if match]


def _not_held(pack: Pack, held: set[str]) -> list[PackedFile]:
    """The files that the far side does not have; to know that, those are read that could be among what it has."""
    for file in pack.survey.files:
        if file.name not in pack.known:
            digest = hashlib.sha256()
            for block in blocks(file):
                digest.update(block)
            pack.known[file.name] = digest.hexdigest()
    return [file for file in pack.survey.files if pack.known[file.name] not in held]


class Sending:
    """The parts of one pack on their way, and the threads that carry them: one for each lane.

    `held` are the files that the far side has from before: then nothing was sent, and the rest is another layout.
    """

    def __init__(self, far: Asks, pack: Pack, parts: Parts, codec: Codec, clock: Clock, end_mono: float) -> None:
        self._far, self._pack, self._parts, self._codec = far, pack, parts, codec
        self._clock, self._end_mono = clock, end_mono
        self._squeeze, self._pace = Squeeze(codec), Pace(0.0)
        self.held: set[str] = set()
        self._there: dict[int, str] = {}
        self._todo = deque(range(parts.count))
        self._unsure: list[int] = []
        self._reading, self._counting = threading.Lock(), threading.Lock()
        self._begun, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._trouble: Exception | None = None

    def send(self, held: str, on_progress: Callable[[int], None] | None) -> None:
        """Send all parts that are not there; then see what became of those that were under way in a cut."""
        while True:
            self._carry(held, on_progress)
            if self.held or not (self._unsure or self._todo):
                self._pack.content_bytes = self._pack.survey.total_bytes
                return
            held = "settled"

    def _begin(self, held: str) -> None:
        """Learn what is there; raise what went wrong before when it has brought nothing further."""
        begun, lines = begin(self._far, self._parts, held)
        if begun.kind == "held":
            self.held, self._todo = {digest.decode() for digest, _ in lines}, deque()
            return
        if self._trouble is not None and (len(lines) <= len(self._there) or self._left_s() <= 0):
            raise self._trouble
        if self._codec not in begun.codecs:
            self._codec, self._squeeze = "gzip", Squeeze("gzip")
        self._there = {int(index): sha256.decode() for index, sha256 in lines if index.isdigit()}
        self._todo, self._unsure = deque(sorted({*self._todo, *self._unsure})), []

    def _carry(self, held: str, on_progress: Callable[[int], None] | None) -> None:
        """Let the lanes carry what is to do, and wait for them. The first ones are opened while it is asked what is."""
        threads: list[threading.Thread] = []
        self._begun.clear()
        try:
            self._add_lanes(threads)
            self._begin(held)
            self._pace.learn(self._far.round_trip_s)
            self._trouble = None
            self._begun.set()
            for thread in threads:  # It grows meanwhile.
                while thread.is_alive():
                    thread.join(TICK_S)
                    self._add_lanes(threads)
                    if on_progress is not None:
                        on_progress(self._pack.content_bytes)
        except BaseException:
            self._stop.set()
            self._begun.set()
            for thread in threads:
                thread.join(JOIN_S)
            self._far.close()  # Whoever is stuck in a connection that has stalled is woken by its end.
            raise
        finally:
            self._far.close_lanes()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def _add_lanes(self, threads: list[threading.Thread]) -> None:
        """As many more lanes as the line is worth."""
        wanted = min(self._pace.look(self._pack.sent_bytes, self._clock.monotonic()), max(1, len(self._todo)))
        if wanted > len(threads):
            for lane in self._far.lanes(wanted)[len(threads) :]:
                threads.append(threading.Thread(target=self._work, args=(lane,), daemon=True))
                threads[-1].start()

    def _work(self, lane: Asks) -> None:
        """Carry parts over one lane, again and again where it is cut, until there are no more."""
        fruitless = 0
        while not self._stop.is_set() and fruitless < MOST_FRUITLESS:
            taken: list[int] = []
            try:
                part = self._next(taken) if self._begun.is_set() else None
                if part is None and self._begun.is_set():
                    return
                self._call(lane, part, taken)
            except (_Stopped, MachineLost, FarRefusal) as error:
                self._unsure += taken
                if isinstance(error, FarRefusal) and error.reason not in ("cut_stream", "wrong_digest"):
                    self._fail(error)
                self._trouble = error
                fruitless = fruitless + 1 if len(taken) < 2 else 0
            except BaseException as error:  # noqa: BLE001 - raised again in `_carry`, on the caller's thread
                self._fail(error)

    def _call(self, lane: Asks, part: Part | None, taken: list[int]) -> None:
        """One stream of parts, beginning with this one, or as soon as it is known what is to be sent."""
        if self._left_s() <= 0:
            raise MachineLost("There was no time left to send the rest.")
        options = ("--sha256", self._parts.layout_sha256, "--codec", self._codec)
        frames = self._frames(self._codec, part, taken)
        line, _ = lane.ask("receive", *options, stdin=frames, site=True, timeout_s=self._left_s())
        understood(Received, line)

    def _frames(self, codec: Codec, first: Part | None, taken: list[int]) -> Iterator[bytes]:
        """The stream: each part with its head, then the end."""
        self._begun.wait()
        if self._stop.is_set():
            raise _Stopped
        part = first or (self._next(taken) if codec == self._codec else None)
        while part is not None:
            begun_mono = self._clock.monotonic()
            data = self._squeeze.squeezed(part.content)
            squeezed_mono = self._clock.monotonic()
            head = _HEAD.pack(part.index, len(part.content), len(data), bytes.fromhex(part.sha256))
            with self._counting:
                self._pack.sent_bytes += len(head) + len(data)
            part = None  # A lane that waits for the line holds what it sends, and no more.
            yield head
            yield data
            self._squeeze.learn(squeezed_mono - begun_mono, self._clock.monotonic() - squeezed_mono)
            part = self._next(taken, IDLE_S)
        yield _HEAD.pack(_END, 0, 0, bytes(32))

    def _next(self, taken: list[int], wait_s: float = -1) -> Part | None:
        """The next part that is not there yet, noted as taken; None when there is none, or none in that time."""
        if not self._reading.acquire(timeout=wait_s):
            return None
        try:
            while self._todo:
                if self._stop.is_set():
                    raise _Stopped
                index = self._todo[0]
                scanned = index < len(self._parts.digests)
                part = None if scanned and self._has(index) else self._parts.read(index)
                self._todo.popleft()
                self._pack.content_bytes = max(self._pack.content_bytes, index * self._parts.part_bytes)
                if part is not None and not self._has(index):
                    taken.append(index)
                    return part
            return None
        finally:
            self._reading.release()

    def _has(self, index: int) -> bool:
        """Whether the far side has a part that was read here before, as it was read."""
        return self._there.get(index) == self._parts.digests[index]

    def _left_s(self) -> float:
        return self._end_mono - self._clock.monotonic()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stop.set()
