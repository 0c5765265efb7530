"""Tests of the local copy of a machine's log: it is exact, resumes from its own length, and is bounded in size."""

from __future__ import annotations

from pathlib import Path

from gpurun.lifecycle.artifacts.log_copy import LocalCopy


def copy_of(path: Path) -> LocalCopy:
    return LocalCopy(path, most_bytes=100, head_bytes=40)


def test_the_next_offset_is_what_is_here(tmp_path: Path) -> None:
    copy = copy_of(tmp_path / "run.log")
    assert copy.offset == 0
    copy.append(b"one\n")
    assert copy_of(tmp_path / "run.log").offset == 4


def test_a_flood_keeps_head_and_latest_and_continues_in_place(tmp_path: Path) -> None:
    flood = b"".join(b"%09d\n" % number for number in range(1000))
    copy = copy_of(tmp_path / "run.log")
    while copy.offset < len(flood):
        copy.append(flood[copy.offset : copy.offset + 30])
        assert copy.path.stat().st_size <= 100
    kept = copy.path.read_bytes()
    assert kept.startswith(flood[:40])
    assert kept.endswith(b"000000999\n")
    assert copy.dropped_bytes == len(flood) - len(kept)


def test_a_crash_between_cut_and_note_loses_and_doubles_nothing(tmp_path: Path) -> None:
    flood = bytes(range(130))
    copy = copy_of(tmp_path / "run.log")
    copy.append(flood[:100])
    (tmp_path / "run.log").write_bytes(flood[:40])  # As if a crash came between the cut and its note.
    again = copy_of(tmp_path / "run.log")
    again.append(flood[again.offset : again.offset + 50])
    assert again.path.read_bytes() == flood[:90]
