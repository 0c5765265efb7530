"""Tests that the wait for a silent bucket is limited from its last progress, and not in total."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import GpurunError, SetupError
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_errors import BucketLost
from gpurun.remote.s3.s3_retry import retry_bucket_call
from tests.emulators.s3 import S3Emulator


class Sending:
    """An upload whose tries take ten minutes and break, except for the last. Each try sends `sent_bytes` bytes."""

    def __init__(self, clock: VirtualClock, *, tries: int, sent_bytes: int) -> None:
        self.clock, self.tries, self.sent_each, self.sent_bytes = clock, tries, sent_bytes, 0

    def __call__(self) -> str:
        self.clock.sleep(600)
        self.sent_bytes += self.sent_each
        self.tries -= 1
        if self.tries:
            raise BucketLost("the line broke")
        return "all of it is there"


def test_a_transfer_that_moves_is_retried_however_long_it_takes() -> None:
    clock = VirtualClock()
    sending = Sending(clock, tries=9, sent_bytes=1)
    assert retry_bucket_call(clock, 60, sending, moved=lambda: sending.sent_bytes) == "all of it is there"


def test_what_does_not_go_on_is_given_up() -> None:
    clock = VirtualClock()
    sending = Sending(clock, tries=9, sent_bytes=0)
    with pytest.raises(BucketLost):
        retry_bucket_call(clock, 60, sending, moved=lambda: sending.sent_bytes)
    assert sending.tries == 8


def raised(ask: Callable[[], object]) -> type[GpurunError]:
    with pytest.raises(GpurunError) as refused:
        ask()
    return refused.type


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", BucketLost),
        (400, "RequestTimeout", BucketLost),
        (400, "IncompleteBody", BucketLost),
        (429, "TooManyRequests", BucketLost),
        (400, "InvalidArgument", SetupError),
    ],
)
def test_what_passes_is_waited_for_and_what_does_not_is_refused(
    s3: S3Emulator, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, status: int, code: str, kind: type[GpurunError]
) -> None:
    """S3 reports a slow line with status 400, and other services report too many requests with 429.

    Both can be retried.
    """
    monkeypatch.setattr(bucket, "_waits", (5, 60, 1))
    s3.fail(1, status, code)
    assert raised(lambda: bucket.put("team/gpt/x", b"x")) is kind
