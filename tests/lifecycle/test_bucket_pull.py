"""A bucket that is away for a moment while a machine waits: a minute is paid sooner than hours of sending from here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.plan import Choices
from gpurun.core.progress import Phase, RunState
from gpurun.lifecycle.bucket import pull as room
from gpurun.lifecycle.bucket.pull import pull
from gpurun.lifecycle.context import Context
from gpurun.machine.bucket.order import NotPulled, Pulled
from gpurun.machine.bucket.staged import StagedFile
from gpurun.machine.bucket.trouble import BucketLost
from gpurun.machine.bucket.wire import Bucket
from gpurun.machine.far import FarSide
from gpurun.machine.pack import Pack

FILE = StagedFile(
    name="data/a.bin", seen=(1,), sha256="a" * 64, bytes=10**10, part_bytes=1 << 20, digests=("0" * 64,), sent=(1,)
)


class Patience:
    """Has all the time of the lease."""

    left_s = 3600.0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Of no step."""

    def moved(self) -> None:
        """Something came."""

    def until_done(self, attempt: Callable[[], None]) -> None:
        attempt()


def pulled(
    monkeypatch: pytest.MonkeyPatch, clock: VirtualClock, order: Callable[[Pulled], None], look: Callable[[], None]
) -> tuple[Pulled, list[Any]]:
    """What came of one staged file, and what was noted, where the machine pulls and the bucket answers like this."""
    monkeypatch.setattr(room, "_staged_of", lambda *_: [FILE])
    monkeypatch.setattr(room, "Patience", Patience)
    monkeypatch.setattr(room, "have_pulled", lambda _, __, ___, came, **____: order(came))
    monkeypatch.setattr(Bucket, "look", lambda _: look())
    lease = SimpleNamespace(ship_s=60)
    plan = SimpleNamespace(choices=Choices(stage="s3://shards/gpt"), lease=lease)
    context = cast(Context, SimpleNamespace(plan=plan, clock=clock, heed=lambda _: None))
    came = Pulled()
    notes = list(pull(RunState(run="fox-41", phase=Phase.READY), context, cast(FarSide, None), cast(Pack, None), came))
    return came, notes


def test_a_bucket_that_is_away_for_half_a_minute_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    back_mono = clock.monotonic() + 30
    told = NotPulled(sha256=FILE.sha256, code="unreachable", message="the bucket answered 503 (SlowDown)")

    def look() -> None:
        if clock.monotonic() < back_mono - 15:
            raise BucketLost("no answer")

    def order(came: Pulled) -> None:
        came.failed = {} if clock.monotonic() >= back_mono else {FILE.sha256: told}
        came.files |= {FILE.sha256} - came.failed.keys()

    came, notes = pulled(monkeypatch, clock, order, look)
    assert (came.files, came.missing_bytes, notes) == ({FILE.sha256}, 0, [])


def test_a_bucket_that_stays_away_is_given_up_after_a_minute_without_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tries = VirtualClock(), 0
    told = NotPulled(sha256=FILE.sha256, code="unreachable", message="the bucket broke off")

    def order(came: Pulled) -> None:
        nonlocal tries
        tries += 1
        clock.sleep(50)
        came.sent_bytes += 1 if tries < 4 else 0
        came.failed = {FILE.sha256: told}

    came, notes = pulled(monkeypatch, clock, order, lambda: None)
    assert tries == 5, "three that brought something, and two within the minute after"
    assert came.missing_bytes == FILE.bytes
    assert [data["code"] for _, data in notes] == ["stage.unreachable"]


def test_what_no_patience_mends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    begun = clock.monotonic()
    told = NotPulled(sha256=FILE.sha256, code="denied", message="the bucket refuses the URL (AccessDenied)")

    def order(came: Pulled) -> None:
        came.failed = {FILE.sha256: told}

    pulled(monkeypatch, clock, order, lambda: None)
    assert clock.monotonic() == begun
