"""How far a transfer or a set-up is: a small file in the run folder for who watches; never durable, never evidence."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from gpurun.core.clock import Clock
from gpurun.core.paths import RunFolder
from gpurun.core.untrusted import read_object

What = Literal["stage", "boot", "setup", "look", "ship", "collect", "wait"]
PERIOD_S = 1.0
# What was not written again for so long tells of a supervisor that is gone.
STALE_S = 30.0


@dataclass(frozen=True)
class Moving:
    """A transfer that goes on: what of it is there at `wall`, and what was at `begun_wall`, when this try began.

    It is told in bytes; a boot, a set-up and a look around in the seconds so far, of those that it may take, with last
    `words`.
    """

    what: What
    done: int
    total: int
    wall: float
    begun: int
    begun_wall: float
    words: str = ""

    @property
    def seconds(self) -> float:
        """How long this try takes so far."""
        return self.wall - self.begun_wall

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of this try; None before there is one."""
        fresh = self.done - self.begun
        return fresh / self.seconds if self.seconds > 0 and fresh > 0 else None


class Tell(Protocol):
    """Takes how far it is, as often as one likes."""

    def __call__(self, done: int, words: str = "") -> None:
        """So far it is by now."""
        ...


@contextmanager
def moving(folder: RunFolder, clock: Clock, what: What, total: int) -> Iterator[Tell]:
    """A transfer; what it yields is told how much of it is there. Its end removes the file."""
    begun: tuple[int, float] | None = None
    due_mono = clock.monotonic()

    def tell(done: int, words: str = "") -> None:
        nonlocal begun, due_mono
        begun = begun or (done, clock.wall())
        if clock.monotonic() < due_mono:
            return
        due_mono = clock.monotonic() + PERIOD_S
        now = Moving(what, done, total, clock.wall(), *begun, words)
        half = folder.moving.with_suffix(".tmp")
        with suppress(OSError):  # A full disk ends no transfer for the sake of a bar.
            half.write_text(json.dumps(asdict(now)))
            os.replace(half, folder.moving)

    try:
        yield tell
    finally:
        with suppress(OSError):
            folder.moving.unlink(missing_ok=True)


def read_moving(folder: RunFolder, now_wall: float) -> Moving | None:
    """The transfer that goes on in a run, if there is one."""
    try:
        told = Moving(**read_object(folder.moving))
        is_fresh = abs(now_wall - told.wall) < STALE_S and told.total > 0
    except (OSError, ValueError, TypeError):
        return None
    return told if is_fresh else None
