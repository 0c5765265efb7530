"""Tests of a transfer's progress note: written at most once a second, and ignored once its writer has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.paths import RunFolder
from gpurun.core.transfer_progress import PERIOD_S, STALE_S, Moving, moving, read_moving
from gpurun.view.plain_lines import PlainView
from gpurun.view.progress_line import moving_line, moving_words
from gpurun.view.style import Style
from gpurun.view.styled_text import count_cells

BEGUN = 1_800_000_000.0


def moved(done: int = 1_200_000_000, *, seconds: float = 20.0) -> Moving:
    return Moving("ship", done, 4_700_000_000, BEGUN + seconds, 440_000_000, BEGUN)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_what_is_told_is_read_by_another_until_the_transfer_ends(folder: RunFolder) -> None:
    clock = VirtualClock()
    with moving(folder, clock, "ship", 100) as tell:
        assert read_moving(folder, clock.wall()) is None
        tell(10)
        clock.sleep(PERIOD_S)
        tell(60)
        seen = read_moving(folder, clock.wall())
        assert seen is not None
        assert (seen.what, seen.done, seen.total, seen.begun) == ("ship", 60, 100, 10)
        assert seen.bytes_per_s == pytest.approx(50 / PERIOD_S)
    assert read_moving(folder, clock.wall()) is None
    assert list(folder.path.iterdir()) == []


def test_it_is_written_once_a_second_however_often_it_is_told(folder: RunFolder) -> None:
    clock = VirtualClock()
    with moving(folder, clock, "collect", 1000) as tell:
        for done in range(100):
            tell(done)
        seen = read_moving(folder, clock.wall())
        assert seen is not None
        assert seen.done == 0


def test_a_stale_or_damaged_progress_note_shows_nothing(folder: RunFolder) -> None:
    clock = VirtualClock()
    with moving(folder, clock, "ship", 100) as tell:
        tell(10)
        left = folder.moving.read_bytes()
    folder.moving.write_bytes(left)
    assert read_moving(folder, clock.wall()) is not None
    assert read_moving(folder, clock.wall() + STALE_S) is None
    for damaged in (b"", left[:-2], b"[]", b'{"what": "ship"}', b"\xff"):
        folder.moving.write_bytes(damaged)
        assert read_moving(folder, clock.wall()) is None


def test_a_disk_that_takes_nothing_ends_no_transfer(tmp_path: Path) -> None:
    with moving(RunFolder(tmp_path / "gone"), VirtualClock(), "ship", 100) as tell:
        tell(10)


def test_it_is_shown_with_rate_and_the_time_that_is_left() -> None:
    assert moving_words(moved()) == "1.2 GB of 4.7 GB, 38 MB/s, 1 m 32 s left"
    assert moving_words(moved(440_000_000)) == "440 MB of 4.7 GB"
    for width in (40, 80, 200):
        assert count_cells(moving_line(moved(), Style(width=width), label=8)) <= max(width, 60)


def test_a_set_up_shows_its_time_and_its_last_words() -> None:
    seen = Moving("setup", 130, 600, BEGUN, 0, BEGUN, "one\nCollecting\rInstalling \x1b[32mlion\x1b[0m\n\n")
    assert moving_words(seen) == "2 m 10 s of 10 m 00 s · Installing lion"
    assert moving_words(replace(seen, words="")) == "2 m 10 s of 10 m 00 s"
    assert len(moving_words(replace(seen, words="x" * 5000))) < 130
    drawn = "".join(span.text for span in moving_line(seen, Style(width=80), label=8))
    assert drawn.startswith(" set-up ")


def test_a_log_notes_only_long_transfers_each_half_minute() -> None:
    plain = PlainView()
    assert plain.update([], [], BEGUN, moved(seconds=1.0)) == []
    assert ["38 MB/s" in line for line in plain.update([], [], BEGUN + 20, moved())] == [True]
    assert plain.update([], [], BEGUN + 40, moved(seconds=40.0)) == []
    assert len(plain.update([], [], BEGUN + 50, moved(seconds=50.0))) == 1
