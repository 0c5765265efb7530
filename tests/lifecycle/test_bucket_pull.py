"""Tests of a bucket that fails while a machine waits for files: a paid minute of waiting may save hours over SSH."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.journal_records import Phase, RunState
from gpurun.core.run_plan import Choices
from gpurun.core.uplink import Uplink
from gpurun.lifecycle.connect import make_lost_error
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.steps import upload_files as room
from gpurun.lifecycle.steps.upload_files import pull_staged
from gpurun.remote.archive import Pack, survey
from gpurun.remote.client import FarSide
from gpurun.remote.s3.objects import Index
from gpurun.remote.s3.pull_request import NotPulled, PullResult
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_errors import BucketLost
from gpurun.remote.s3.s3_upload import digests_of
from gpurun.remote.s3.staged_files import Staged, StagedFile, staged_file

FILE = StagedFile(
    name="data/a.bin", seen=(1,), sha256="a" * 64, bytes=10**10, part_bytes=1 << 20, digests=("0" * 64,), sent=(1,)
)


class Patience:
    """A replacement for gpurun's patience that tries once and never runs out of time."""

    def __init__(self, *_: Any, limit_s: float) -> None:
        self.left_s = limit_s

    def moved(self) -> None:
        """Ignore the progress."""

    def until_done(self, attempt: Callable[[], None]) -> None:
        attempt()


def pulled(
    monkeypatch: pytest.MonkeyPatch,
    clock: VirtualClock,
    order: Callable[[PullResult], None] | None = None,
    look: Callable[[], None] = lambda: None,
    at: Callable[[int], float] = lambda _: 0.0,
) -> tuple[PullResult, list[Any]]:
    """Pull one staged file by the script; return the result and the notes for the user.

    `order` scripts the machine's pulls and `look` the bucket's answers. Without `order`, `at(n)` gives the bits
    that arrive in second n.
    """

    def at_a_pace(came: PullResult, on_progress: Callable[[], None], timeout_s: float) -> None:
        begun_mono = clock.monotonic()
        while came.sent_bytes < FILE.bytes:
            clock.sleep(1)
            came.sent_bytes += int(at(int(clock.monotonic() - begun_mono)) / 8)
            on_progress()
            if clock.monotonic() - begun_mono > timeout_s:
                raise make_lost_error("It took too long.")
        came.files.add(FILE.sha256)

    monkeypatch.setattr(room, "_staged_of", lambda *_: [FILE])
    monkeypatch.setattr(room, "Patience", Patience)
    scripted = (lambda came, **_: order(came)) if order else at_a_pace
    monkeypatch.setattr(room, "have_pulled", lambda _, __, ___, came, **more: scripted(came, **more))
    monkeypatch.setattr(Bucket, "look", lambda _: look())
    lease = SimpleNamespace(ship_s=110, train_s=10_000)  # The plan's time for 10 GB at 1 Gbit/s.
    plan = SimpleNamespace(choices=Choices(stage="s3://shards/gpt"), lease=lease, uplink=Uplink())
    context = cast(Context, SimpleNamespace(plan=plan, clock=clock, raise_if_stopped=lambda _: None))
    came = PullResult()
    notes = list(
        pull_staged(RunState(run="fox-41", phase=Phase.READY), context, cast(FarSide, None), cast(Pack, None), came)
    )
    return came, notes


def test_a_bucket_that_is_away_for_half_a_minute_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    back_mono = clock.monotonic() + 30
    not_pulled = NotPulled(sha256=FILE.sha256, code="unreachable", message="the bucket answered 503 (SlowDown)")

    def look() -> None:
        if clock.monotonic() < back_mono - 15:
            raise BucketLost("no answer")

    def order(came: PullResult) -> None:
        came.failed = {} if clock.monotonic() >= back_mono else {FILE.sha256: not_pulled}
        came.files |= {FILE.sha256} - came.failed.keys()

    came, notes = pulled(monkeypatch, clock, order, look)
    assert (came.files, came.missing_bytes, notes) == ({FILE.sha256}, 0, [])


def test_a_bucket_is_given_up_after_a_minute_without_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tries = VirtualClock(), 0
    not_pulled = NotPulled(sha256=FILE.sha256, code="unreachable", message="the bucket broke off")

    def order(came: PullResult) -> None:
        nonlocal tries
        tries += 1
        clock.sleep(50)
        came.sent_bytes += 1 if tries < 4 else 0
        came.failed = {FILE.sha256: not_pulled}

    came, notes = pulled(monkeypatch, clock, order, lambda: None)
    assert tries == 5, "three that brought something, and two within the minute after"
    assert came.missing_bytes == FILE.bytes
    assert [note.code for note in notes] == ["stage.unreachable"]


def test_what_no_patience_mends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    begun = clock.monotonic()
    not_pulled = NotPulled(sha256=FILE.sha256, code="denied", message="the bucket refuses the URL (AccessDenied)")

    def order(came: PullResult) -> None:
        came.failed = {FILE.sha256: not_pulled}

    pulled(monkeypatch, clock, order, lambda: None)
    assert clock.monotonic() == begun


def test_a_slow_bucket_is_kept_when_ssh_would_be_slower_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bucket is ten times slower than planned but five times faster than SSH: the file still comes from it."""
    clock = VirtualClock()
    begun = clock.monotonic()
    came, notes = pulled(monkeypatch, clock, at=lambda _: 100e6)
    assert (came.files, came.missing_bytes, notes) == ({FILE.sha256}, 0, [])
    assert clock.monotonic() - begun == pytest.approx(800, abs=1)


@pytest.mark.parametrize("bits_per_s", [0.0, 19e6], ids=["nothing", "slow"])
def test_a_bucket_slower_than_ssh_is_left_after_a_minute(monkeypatch: pytest.MonkeyPatch, bits_per_s: float) -> None:
    clock = VirtualClock()
    begun = clock.monotonic()
    came, notes = pulled(monkeypatch, clock, at=lambda second: 1e9 if second < 30 else bits_per_s)
    assert clock.monotonic() - begun < 130
    assert came.missing_bytes == FILE.bytes
    assert [note.code for note in notes] == ["stage.not_pulled"]
    assert "stage.slow" in notes[0].message


def test_a_lid_that_was_closed_while_it_came_is_no_slow_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()

    def at(second: int) -> float:
        if second == 20:
            clock.sleep(600)
        return 200e6

    came, notes = pulled(monkeypatch, clock, at=at)
    assert (came.files, notes) == ({FILE.sha256}, [])


def test_a_touched_file_is_pulled_and_a_changed_one_is_not(tmp_path: Path) -> None:
    """Files may get new timestamps while gpurun waits, as when a disk is mounted again; only their bytes count."""
    data, staged = tmp_path / "data", tmp_path / "staged.json"
    data.mkdir()
    for name in ("same.bin", "touched.bin", "changed.bin"):
        (data / name).write_bytes(name.encode() * 100_000)
    before = {file.name: (file, digests_of(file, lambda: None)) for file in survey({"data": data}).files}
    index = Index(sha256="", bytes=1, part_bytes=1, sent=(1,), etag="")
    files = tuple(staged_file(file, digests, index) for file, digests in before.values())
    staged.write_bytes(Staged(url="s3://shards/gpt", files=files).to_json().encode())
    os.utime(data / "touched.bin", (1, 1))
    (data / "changed.bin").write_bytes(b"CHANGED.bin" * 100_000)
    plan = SimpleNamespace(choices=Choices(stage="s3://shards/gpt"))
    context = cast(
        Context, SimpleNamespace(plan=plan, folder=SimpleNamespace(staged=staged), raise_if_stopped=lambda _: None)
    )
    pack = Pack(survey({"data": data}))
    found = room._staged_of(RunState(run="fox-41", phase=Phase.READY), context, pack)
    assert {file.name for file in found} == {"data/same.bin", "data/touched.bin"}
    assert pack.known == {file.name: file.sha256 for file in found}
