"""The trainer's events and log as they grow on the instance, brought here piece by piece."""

from __future__ import annotations

from gpurun.core.paths import RunFolder
from gpurun.lifecycle.home.local_copy import LocalCopy
from gpurun.machine.base import MachineLost
from gpurun.machine.far import FarSide, Poll

MOST_BYTES = 4 << 20
LEAST_BYTES = 64 << 10


class Tail:
    """Brings what is new of both; where a slow line does not carry a piece in one call, a smaller one is asked for."""

    def __init__(self, far: FarSide, folder: RunFolder) -> None:
        self._far = far
        self._copies = {"events.jsonl": LocalCopy(folder.events), "trainer.log": LocalCopy(folder.log)}
        self._most_bytes = MOST_BYTES

    def bring(self) -> Poll:
        """The agent's status, once what came with it is appended here."""
        try:
            poll = self._far.poll({name: (copy.offset, self._most_bytes) for name, copy in self._copies.items()})
        except MachineLost:
            self._most_bytes = max(LEAST_BYTES, self._most_bytes // 4)
            raise
        self._most_bytes = min(MOST_BYTES, 2 * self._most_bytes)
        for name, chunk in poll.chunks.items():
            self._copies[name].append(chunk.data)
        return poll


def is_behind(poll: Poll, name: str) -> bool:
    """Whether more of a file than has come is to be had at once."""
    chunk = poll.chunks[name]
    return bool(chunk.data) and chunk.offset + len(chunk.data) < chunk.size
