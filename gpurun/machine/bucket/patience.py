"""Waiting for a bucket that does not answer for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpurun.core.clock import Clock, ticks
from gpurun.machine.base import MachineLost
from gpurun.machine.bucket.trouble import BucketLost

AGAIN_S = 5.0

T = TypeVar("T")


def patiently(
    clock: Clock,
    patience_s: float,
    attempt: Callable[[], T],
    *,
    heed: Callable[[], None] = lambda: None,
    moved: Callable[[], object] = lambda: None,
) -> T:
    """Do what may be repeated until the bucket answers; the last BucketLost or MachineLost when patience ends.

    `heed` is called before each try; what it raises ends the waiting. A try after which `moved` is another value has
    come further: patience begins anew.
    """
    while True:
        before, lost = moved(), None
        for _ in ticks(clock, AGAIN_S, patience_s):
            heed()
            try:
                return attempt()
            except (BucketLost, MachineLost) as error:
                lost = error
            if moved() != before:
                break
        assert lost is not None, "there is at least one try"
        if moved() == before:
            raise lost
        clock.sleep(AGAIN_S)
