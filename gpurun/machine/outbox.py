"""The parts of a pack that are still to be sent: read in their order, and taken by whichever lane is free."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpurun.machine.pack import Codec, Pack
from gpurun.machine.parts import Part, Parts
from gpurun.machine.squeeze import Squeeze

# What is read and compressed before it is known what is wanted: as much as a few lanes carry at once.
MOST_AHEAD_BYTES = 32 << 20


class Stopped(Exception):
    """This side has ended the sending; never seen outside."""


class Outbox:
    """What is to be sent of these parts. Any number of threads may take from it."""

    def __init__(self, pack: Pack, parts: Parts, codec: Codec) -> None:
        self.codec = codec
        self._pack, self._parts, self._squeeze = pack, parts, Squeeze(codec)
        self._there: dict[int, str] = {}
        self._todo = deque(range(parts.count))
        self._unsure: list[int] = []
        self._ahead: dict[int, Part] = {}
        self._reading = threading.Lock()
        self._is_overtaken = False
        self._held_bytes = pack.survey.total_bytes - parts.total_bytes
        pack.content_bytes = max(pack.content_bytes, self._held_bytes)
        self.is_stopped = False

    @property
    def left(self) -> int:
        """How many parts nobody has taken."""
        return len(self._todo)

    @property
    def is_done(self) -> bool:
        """Whether all were taken, and none of them was under way in a cut."""
        return not (self._unsure or self._todo)

    def read_ahead(self) -> bool:
        """Read the first parts, and compress them, before they are asked for; whether all were read.

        It may begin before the far side has said what it has: they have to be read in any case, as their digests tell
        what is there already. It ends where whoever sends has come as far.
        """
        with self._reading:
            ahead_bytes = sum(len(part.squeezed or b"") for part in self._ahead.values())
            self._is_overtaken = False
        while ahead_bytes < MOST_AHEAD_BYTES:
            with self._reading:
                if self.is_stopped or self._is_overtaken or self._is_read or not self._todo:
                    return self._is_read
                squeeze, part = self._squeeze, self._parts.read(len(self._parts.digests))
                is_wanted = not self._has(part.index)
            squeezed = squeeze.squeezed(part.content) if is_wanted else b""
            ahead_bytes += len(squeezed)
            with self._reading:
                if is_wanted and squeeze is self._squeeze and self._todo and part.index >= self._todo[0]:
                    self._ahead[part.index] = replace(part, content=b"", squeezed=squeezed)
        return False

    @property
    def _is_read(self) -> bool:
        return len(self._parts.digests) == self._parts.count

    def learn(self, there: Mapping[int, str], codecs: Iterable[str]) -> bool:
        """Take in which parts the far side has, by digest, and what it can unpack; whether it has more than before."""
        is_more = len(there) > len(self._there)
        with self._reading:
            if self.codec not in codecs:
                self.codec, self._squeeze = "gzip", Squeeze("gzip")
                self._ahead.clear()
            self._there = dict(there)
            self._todo, self._unsure = deque(sorted({*self._todo, *self._unsure})), []
        return is_more

    def doubt(self, taken: Iterable[int]) -> None:
        """Parts that were taken may not have arrived."""
        self._unsure += taken

    def stop(self) -> None:
        """Give out no more."""
        self.is_stopped = True

    def clear(self) -> None:
        """Nothing of it is wanted."""
        self._todo.clear()
        self._ahead.clear()

    def next(self, taken: list[int], wait_s: float = -1) -> Part | None:
        """The next part that is not there yet, noted as taken; None when there is none, or none in that time."""
        if not self._reading.acquire(timeout=wait_s):
            return None
        try:
            while self._todo:
                if self.is_stopped:
                    raise Stopped
                index = self._todo[0]
                part = self._ahead.pop(index, None)
                if part is None and not self._has(index):
                    self._is_overtaken = True
                    part = self._parts.read(index)
                self._todo.popleft()
                before_bytes = self._held_bytes + index * self._parts.part_bytes
                self._pack.content_bytes = max(self._pack.content_bytes, before_bytes)
                if part is not None and not self._has(index):
                    taken.append(index)
                    return part
            return None
        finally:
            self._reading.release()

    def squeezed(self, part: Part) -> bytes:
        """A part as it is sent."""
        return self._squeeze.squeezed(part.content) if part.squeezed is None else part.squeezed

    def sent(self, squeeze_s: float, send_s: float) -> None:
        """Take in how long one part took to compress and then to send."""
        self._squeeze.learn(squeeze_s, send_s)

    def _has(self, index: int) -> bool:
        """Whether the far side has a part that was read here before, as it was read."""
        return index < len(self._parts.digests) and self._there.get(index) == self._parts.digests[index]
