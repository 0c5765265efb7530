"""Shards that nobody will train on: their command was killed between preparing them and opening its run."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from gpurun.core.clock import Clock
from gpurun.core.paths import Home

AFTER_S = 86_400.0


def drop_abandoned(home: Home, clock: Clock) -> None:
    """Remove the shards of commands that are gone, a day after; one that waits for its answer keeps its own."""
    for staged in home.staged.glob("*.*"):
        with suppress(OSError):  # Another command may be doing the same.
            if clock.wall() - staged.stat().st_mtime > AFTER_S and not _exists(staged.suffix[1:]):
                shutil.rmtree(staged)


def _exists(pid: str) -> bool:
    """Whether there is a process of this number; what is no number is none."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
