"""The progress of a transfer or set-up, in a small file of the run folder: for viewers, not durable, no evidence."""

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
# A file that is older than this is from a supervisor that no longer runs.
STALE_S = 30.0


@dataclass(frozen=True)
class Moving:
    """A transfer, or another task, that is running now: `done` of `total` at the time `wall`.

    This attempt began at `begun_wall`, when `begun` was done already. The unit is bytes; for a boot, a set-up or a
    check it is seconds, of which `total` are allowed. `words` is the last output.
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
        """Return how long this attempt has taken so far."""
        return self.wall - self.begun_wall

    @property
    def bytes_per_s(self) -> float | None:
        """Return the rate of this attempt; None if nothing has been transferred yet."""
        fresh = self.done - self.begun
        return fresh / self.seconds if self.seconds > 0 and fresh > 0 else None


class Tell(Protocol):
    """A function that records the progress of a task; the caller may call it at any rate."""

    def __call__(self, done: int, words: str = "") -> None:
        """Record the amount that is done so far."""
        ...


@contextmanager
def moving(folder: RunFolder, clock: Clock, what: What, total: int) -> Iterator[Tell]:
    """Yield a function that records the progress of a task in the run folder; remove the record at the end."""
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
        with suppress(OSError):  # This is only for a progress bar: a full disk must not end the transfer.
            half.write_text(json.dumps(asdict(now)))
            os.replace(half, folder.moving)

    try:
        yield tell
    finally:
        with suppress(OSError):
            folder.moving.unlink(missing_ok=True)


def read_moving(folder: RunFolder, now_wall: float) -> Moving | None:
    """Return the transfer or task that a run is doing now; None if there is no record from the last STALE_S seconds."""
    try:
        progress = Moving(**read_object(folder.moving))
        is_fresh = abs(now_wall - progress.wall) < STALE_S and progress.total > 0
    except (OSError, ValueError, TypeError):
        return None
    return progress if is_fresh else None
