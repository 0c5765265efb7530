"""Waits for a bucket that temporarily does not reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpurun.core.clock import Clock
from gpurun.core.retry import Retry
from gpurun.remote.interface import MachineLost
from gpurun.remote.s3.s3_errors import BucketLost

AGAIN_S = 5.0

T = TypeVar("T")


def retry_bucket_call(
    clock: Clock,
    patience_s: float,
    attempt: Callable[[], T],
    *,
    raise_if_stopped: Callable[[], None] = lambda: None,
    moved: Callable[[], object] = lambda: None,
) -> T:
    """Repeat a call until the bucket replies. Raise the last BucketLost or MachineLost after `patience_s`.

    `raise_if_stopped` is called before each attempt, and its exception ends the wait. If `moved` returns another value
    after an attempt, that attempt has made progress, and the waiting time starts again.
    """
    retry, seen = Retry(clock, AGAIN_S, limit_s=patience_s), moved()

    def failed(_: Exception) -> None:
        nonlocal seen
        if moved() != seen:
            seen = moved()
            retry.moved()

    return retry.until_done(attempt, (BucketLost, MachineLost), before=raise_if_stopped, failed=failed)
