"""Tests of downloading public shards to a rented machine: twice the planned time ends the run with exit code 5."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode, NoOffer
from gpurun.core.journal_records import Phase, RunState
from gpurun.core.run_plan import DataSummary, PublicFile
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.steps import upload_files as room
from gpurun.planning.transfer import download_s
from gpurun.remote.client import FarSide
from gpurun.remote.s3.pull_request import NotPulled, PullResult
from tests.refusals import refusal

FILE = PublicFile(name="train_000001.bin", url="https://hub.org/train_000001.bin", bytes=10**10, sha256="a" * 64)
DATA = DataSummary(
    folder="", tokenizer="gpt2", tokenizer_sha256="", vocab_size=50257, train_tokens=10**9, val_tokens=10**6,
    bytes=FILE.bytes, sha256="", source="hf:me/tokens@0123", public=(FILE,),
)  # fmt: skip


class Patience:
    """A replacement for gpurun's patience that counts down by the test's clock."""

    def __init__(self, _: RunState, context: Any, *, limit_s: float) -> None:
        self._clock, self._end_mono = context.clock, context.clock.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return max(1.0, self._end_mono - self._clock.monotonic())

    def moved(self) -> None: ...

    def until_done(self, attempt: Callable[[], None]) -> None:
        attempt()


def downloaded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    order: Callable[[VirtualClock, PullResult, Callable[[], None]], None],
) -> tuple[int, float]:
    """Let the machine download as `order` scripts it; return the bytes received and the seconds taken."""
    clock, result = VirtualClock(), PullResult()
    begun = clock.monotonic()

    def script(_: object, __: object, ___: object, came: PullResult, *, on_progress: Any, timeout_s: float) -> None:
        order(clock, came, on_progress)
        result.sent_bytes = came.sent_bytes

    monkeypatch.setattr(room, "Patience", Patience)
    monkeypatch.setattr(room, "have_downloaded", script)
    folder = SimpleNamespace(moving=tmp_path / "moving.json")
    plan = SimpleNamespace(data=DATA)
    context = SimpleNamespace(plan=plan, clock=clock, folder=folder, raise_if_stopped=lambda _: None)
    room._download(RunState(run="fox-41", phase=Phase.READY), cast(Context, context), cast(FarSide, None))
    return result.sent_bytes, clock.monotonic() - begun


def at(bits_per_s: float) -> Callable[[VirtualClock, PullResult, Callable[[], None]], None]:
    def order(clock: VirtualClock, came: PullResult, on_progress: Callable[[], None]) -> None:
        while came.sent_bytes < FILE.bytes:
            clock.sleep(1)
            came.sent_bytes += int(bits_per_s / 8)
            on_progress()
        came.files.add(FILE.sha256)

    return order


def failing(code: str, times: int) -> Callable[[VirtualClock, PullResult, Callable[[], None]], None]:
    """Return an order that fails `times` times with this code, and then succeeds at once."""

    def order(clock: VirtualClock, came: PullResult, on_progress: Callable[[], None]) -> None:
        nonlocal times
        clock.sleep(1)
        times -= 1
        not_pulled = NotPulled(sha256=FILE.sha256, code=code, message="its words")
        came.failed = {FILE.sha256: not_pulled} if times >= 0 else {}

    return order


def test_a_line_as_planned_downloads_the_shards_in_planned_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    came, seconds = downloaded(monkeypatch, tmp_path, at(5e8))
    assert (came, seconds) == (FILE.bytes, pytest.approx(download_s(FILE.bytes), abs=1))
    assert downloaded(monkeypatch, tmp_path, at(2.6e8))[0] >= FILE.bytes


def test_a_download_over_twice_its_time_ends_with_bytes_and_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with refusal(NoOffer, "data.slow", "hf:me/tokens@0123", "GB of 10 GB", "12 MB") as ended:
        downloaded(monkeypatch, tmp_path, at(1e8))
    assert (ended.value.code, ended.value.exit_code) == ("data.slow", ExitCode.NO_OFFER)


def test_a_hub_briefly_away_is_waited_for_and_a_refusal_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert downloaded(monkeypatch, tmp_path, failing("unreachable", 3))[1] < 60
    for code, tries in (("altered", 1), ("denied", 1), ("not_public", 1), ("unreachable", 1000)):
        with pytest.raises(NoOffer, match="its words") as ended:
            downloaded(monkeypatch, tmp_path, failing(code, tries))
        assert ended.value.code == f"data.{code}"
