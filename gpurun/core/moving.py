"""How far a transfer is: a small file in the run folder, for whoever watches; never durable, never evidence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Literal

from gpurun.core.clock import Clock
from gpurun.core.paths import RunFolder

What = Literal["stage", "ship", "collect"]
Tell = Callable[[int], None]
PERIOD_S = 1.0
# What was not written again for so long tells of a supervisor that is gone.
STALE_S = 30.0


@dataclass(frozen=True)
class Moving:
    """A transfer that goes on: what of it is there at `wall`, and what was at `begun_wall`, when this try began."""

    what: What
    done_bytes: int
    total_bytes: int
    wall: float
    begun_bytes: int
    begun_wall: float

    @property
    def seconds(self) -> float:
        """How long this try takes so far."""
        return self.wall - self.begun_wall

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of this try; None before there is one."""
        fresh = self.done_bytes - self.begun_bytes
        return fresh / self.seconds if self.seconds > 0 and fresh > 0 else None


@contextmanager
def moving(folder: RunFolder, clock: Clock, what: What, total_bytes: int) -> Iterator[Tell]:
    """A transfer; what it yields is told how many bytes are there, as often as one likes. Its end removes the file."""
    begun: tuple[int, float] | None = None
    due_mono = clock.monotonic()

    def tell(done_bytes: int) -> None:
        nonlocal begun, due_mono
        begun = begun or (done_bytes, clock.wall())
        if clock.monotonic() < due_mono:
            return
        due_mono = clock.monotonic() + PERIOD_S
        now = Moving(what, done_bytes, total_bytes, clock.wall(), *begun)
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
        told = Moving(**json.loads(folder.moving.read_bytes()))
        is_fresh = abs(now_wall - told.wall) < STALE_S and told.total_bytes > 0
    except (OSError, ValueError, TypeError):
        return None
    return told if is_fresh else None
