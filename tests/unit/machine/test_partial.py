"""Tests of a partly downloaded file: only one process at a time writes it, and none after it was verified."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.core.errors import StoreFull
from gpurun.remote import download as fetching
from gpurun.remote import resumable_file as partial
from gpurun.remote.download import Pull, WantedFile, fetch, noted_bytes
from gpurun.remote.interface import MachineLost, Take
from gpurun.remote.resumable_file import Partial, Taker

CONTENT = b"what was announced" * 1000
WANTED = WantedFile("weights", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def written(partial: Partial, offset: int, content: bytes) -> None:
    taker = Taker(partial, offset)
    taker.take(content)
    taker.flush()


def test_a_file_that_somebody_is_at_is_not_opened_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "WAIT_S", 0.2)
    with Partial(tmp_path / "one", 5), pytest.raises(MachineLost, match="another process"):
        Partial(tmp_path / "one", 5).__enter__()
    with Partial(tmp_path / "one", 5) as mine:
        assert mine.have_bytes == 0, "its end frees it"


def test_a_waiter_for_a_file_cannot_alter_it_once_verified(tmp_path: Path) -> None:
    late_is_in = threading.Event()
    failed: list[MachineLost] = []

    def write_late() -> None:
        try:
            with Partial(tmp_path / "part", 5) as late:
                late_is_in.set()
                written(late, 0, b"EVIL!")
        except MachineLost as lost:
            failed.append(lost)

    with Partial(tmp_path / "part", 5) as first:
        written(first, 0, b"right")
        thread = threading.Thread(target=write_late)
        thread.start()
        assert not late_is_in.wait(0.2), "one writer at a time"
        assert first.is_whole(hashlib.sha256(b"right").hexdigest())
        first.settle(tmp_path / "target")
    thread.join()
    assert not failed
    assert (tmp_path / "target").read_bytes() == b"right"
    assert (tmp_path / "part").read_bytes() == b"EVIL!", "it got a file of its own"


def test_a_file_named_between_opening_and_locking_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part").write_bytes(b"right")
    flock, settles = fcntl.flock, iter([True])

    def late(descriptor: int, how: int) -> None:
        if next(settles, False):
            (tmp_path / "part").rename(tmp_path / "target")
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with Partial(tmp_path / "part", 5) as mine:
        written(mine, 0, b"EVIL!")
    assert (tmp_path / "target").read_bytes() == b"right"


def test_what_another_has_brought_meanwhile_is_not_fetched_again(tmp_path: Path) -> None:
    begun, go_on, asked = threading.Event(), threading.Event(), list[int]()

    def slow(offset: int, most: int, take: Take) -> None:
        begun.set()
        assert go_on.wait(10)
        take(CONTENT[offset : offset + most])

    def counted(offset: int, most: int, take: Take) -> None:
        asked.append(offset)
        take(CONTENT[offset : offset + most])

    first = threading.Thread(target=fetch, args=(WANTED, tmp_path, slow))
    second = threading.Thread(target=fetch, args=(WANTED, tmp_path, counted))
    first.start()
    assert begun.wait(10)
    second.start()
    second.join(0.2)
    go_on.set()
    for thread in (first, second):
        thread.join(10)
    assert (tmp_path / "weights").read_bytes() == CONTENT
    assert asked == []
    assert not any((tmp_path / ".partial").iterdir())


def test_an_idle_fetcher_is_not_taken_for_a_working_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "SYNC_S", 0.01)
    noted = [noted_bytes(tmp_path, WANTED.sha256)]

    def stands_still(_: int, __: int, take: Take) -> None:
        time.sleep(0.1)
        noted.append(noted_bytes(tmp_path, WANTED.sha256))
        raise MachineLost("nothing came")

    for _ in range(2):
        with pytest.raises(MachineLost, match="nothing came"):
            fetch(WANTED, tmp_path, stands_still)
    assert set(noted) == {0}
    with Partial(tmp_path / ".partial" / WANTED.sha256, len(CONTENT)) as mine:
        written(mine, 0, b"what")
        assert noted_bytes(tmp_path, WANTED.sha256) == 4


def test_pieces_that_two_lanes_write_at_once_are_both_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = partial._merge_ranges
    with Partial(tmp_path / "part", 10) as mine:
        other = threading.Thread(target=written, args=(mine, 5, b"right"))

        def slowly(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
            if not other.ident:  # The first thread is overtaken here, unless the other must wait for it.
                other.start()
                other.join(0.2)
            return merged(extents)

        monkeypatch.setattr(partial, "_merge_ranges", slowly)
        written(mine, 0, b"right")
        other.join()
        assert mine.have_bytes == 10


def test_the_list_of_what_arrived_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"not ours")
    (tmp_path / "part.parts").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        Partial(tmp_path / "part", 5).__enter__()
    assert (tmp_path / "outside").read_bytes() == b"not ours"


def in_halves(until: threading.Event) -> Pull:
    """Return a pull that delivers half of the content at once, and the rest when the event is set."""

    def pull(offset: int, most: int, take: Take) -> None:
        take(CONTENT[offset : offset + most // 2])
        assert until.wait(20)
        take(CONTENT[offset + most // 2 : offset + most])

    return pull


def test_what_has_come_is_brought_to_the_disk_while_more_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = threading.Event(), os.fdatasync

    def fdatasync(descriptor: int) -> None:
        real(descriptor)
        synced.set()

    monkeypatch.setattr(fetching, "SYNC_S", 0.01)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert fetch(WANTED, tmp_path, in_halves(synced)).read_bytes() == CONTENT


def test_a_disk_full_at_the_sync_is_reported_and_names_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def full(descriptor: int) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(fetching, "SYNC_S", 0.01)
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(StoreFull, match="no room"):
            fetch(WANTED, tmp_path, in_halves(failed))
    assert not (tmp_path / WANTED.name).exists()
    assert fetch(WANTED, tmp_path, in_halves(failed)).read_bytes() == CONTENT


# Notes about the pieces that have arrived


@pytest.fixture
def boots(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of this machine's boot ids, whose last one is the current boot."""
    names = ["one"]
    monkeypatch.setattr(partial, "boot_id", lambda: names[-1])
    return names


def have(path: Path) -> list[tuple[int, int]]:
    with Partial(path, 10) as mine:
        return mine._have


def test_what_a_killed_process_had_counts_until_the_next_boot(tmp_path: Path, boots: list[str]) -> None:
    with Partial(tmp_path / "part", 10) as mine:
        written(mine, 0, b"12")
        written(mine, 6, b"78")
    assert have(tmp_path / "part") == [(0, 2), (6, 8)]
    boots.append("two")
    assert have(tmp_path / "part") == [], "nothing says that it was on the disk"


def test_after_a_reboot_only_synced_bytes_count(tmp_path: Path, boots: list[str]) -> None:
    with Partial(tmp_path / "part", 10) as mine:
        written(mine, 0, b"12")
        mine.sync()
        written(mine, 6, b"78")
    boots.append("two")
    with Partial(tmp_path / "part", 10) as mine:
        assert mine._have == [(0, 2)]
        written(mine, 2, b"34")
    boots.append("three")
    assert have(tmp_path / "part") == [(0, 2)], "what was believed once is still on the disk; the rest may not be"


def test_what_arrives_during_a_sync_does_not_count_as_synced(
    tmp_path: Path, boots: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Partial(tmp_path / "part", 10) as mine:
        written(mine, 0, b"12")
        monkeypatch.setattr(os, "fdatasync", lambda descriptor: written(mine, 2, b"34"))
        mine.sync()
    boots.append("two")
    assert have(tmp_path / "part") == [(0, 2)]


def test_without_fdatasync_as_on_macos_all_of_it_is_synced(
    tmp_path: Path, boots: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fdatasync")
    with Partial(tmp_path / "part", 10) as mine:
        written(mine, 0, b"12")
        mine.sync()
    boots.append("two")
    assert have(tmp_path / "part") == [(0, 2)]


def test_half_a_line_does_not_join_the_next_as_another_piece(tmp_path: Path) -> None:
    with Partial(tmp_path / "part", 10) as mine:
        written(mine, 0, b"12")
        written(mine, 4, b"5")
    with (tmp_path / "part.parts").open("ab") as notes:
        notes.write(b"1")  # The last note of a killed process; joined with the next one it would read "12 1".
    with Partial(tmp_path / "part", 10) as mine:
        written(mine, 2, b"3")
    assert have(tmp_path / "part") == [(0, 3), (4, 5)]


def test_notes_of_content_that_is_not_there_do_not_count(tmp_path: Path) -> None:
    with Partial(tmp_path / "part", 10) as mine:
        written(mine, 0, b"12")
        written(mine, 2, b"3456")
    (tmp_path / "part").write_bytes(b"12")
    assert have(tmp_path / "part") == [(0, 2)]


@given(st.binary(max_size=80), st.booleans())
def test_notes_of_any_kind_are_read_without_a_mistake(
    tmp_path_factory: pytest.TempPathFactory, notes: bytes, of_this_boot: bool
) -> None:
    folder = tmp_path_factory.mktemp("notes")
    (folder / "part").write_bytes(b"0123456789")
    (folder / "part.parts").write_bytes((partial._boot_line() if of_this_boot else b"") + notes)
    with Partial(folder / "part", 10) as mine:
        assert all(0 <= start < end <= 10 for start, end in mine._have)
        mine.discard()
        written(mine, 0, b"0123456789")
        assert mine.is_whole(hashlib.sha256(b"0123456789").hexdigest())
