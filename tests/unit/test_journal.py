"""Tests of the journal: gpurun continues only after a record is on disk, and trusts no record after a break."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.core import filelock
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode, SetupError, VerificationFailed
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import canonical
from gpurun.ledger import fsync as durable
from gpurun.ledger.journal import GENESIS, Journal, JournalDamaged, read_journal, require_durable
from tests.refusals import refusal
from tests.unit.ledger_samples import edit_lines, finished_run

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "fox-41" / "journal.jsonl"


def written(path: Path, count: int = 4) -> Journal:
    journal = Journal.open(path, VirtualClock())
    for number in range(count):
        journal.write(Event.INCIDENT, {"code": "test", "message": f"number {number}"})
    return journal


def test_each_line_names_the_sha256_of_the_one_before(path: Path) -> None:
    written(path)
    lines = path.read_bytes().splitlines()
    before = [GENESIS, *(hashlib.sha256(line).hexdigest() for line in lines)]
    records = [json.loads(line) for line in lines]
    assert [record["prev"] for record in records] == before[:-1]
    assert [record["seq"] for record in records] == [1, 2, 3, 4]
    assert all(canonical(record) == line for record, line in zip(records, lines, strict=True))


def test_only_the_owner_can_read_it(path: Path) -> None:
    written(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@given(data=st.dictionaries(st.text(), JSON, max_size=4))
def test_a_record_reads_back_as_it_was_returned(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    record = Journal.open(path, VirtualClock()).write(Event.CREATE_UNKNOWN, data)
    assert read_journal(path).records == (record,)
    assert record.data == data


def test_a_file_name_that_is_not_unicode_blocks_no_way_out(path: Path) -> None:
    record = written(path, 0).write(Event.STEP_FAILED, {"message": "cannot read a\udcffb"})
    assert record.data == {"message": "cannot read a?b"}


def test_record_and_name_are_on_disk_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd))[1])
    journal = written(path, 1)
    assert synced == [path.stat().st_ino, path.parent.stat().st_ino]
    journal.write(Event.INCIDENT, {"code": "again", "message": ""})
    assert synced[2:] == [path.stat().st_ino]


def test_what_it_says_of_the_home_is_told_from_there(tmp_path: Path) -> None:
    """An incident is quoted in the receipt, so it must not contain the home's absolute path with the user's name."""
    path = tmp_path / "runs" / "fox-41" / "journal.jsonl"
    message = f"{path.parent}/artifacts is full, /mnt/x is not"
    Journal.open(path, VirtualClock()).write(Event.INCIDENT, {"code": "collect.disk_full", "message": message})
    (record,) = read_journal(path).records
    assert record.data["message"] == "runs/fox-41/artifacts is full, /mnt/x is not"


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_last_line_is_cut_and_the_cut_recorded(path: Path, cut: int) -> None:
    written(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    reading = read_journal(path)
    assert len(reading.records) == 3
    assert reading.torn
    assert reading.damage is None
    last = Journal.open(path, VirtualClock()).records[-1]
    assert last.event is Event.JOURNAL_REPAIRED
    assert last.data == {"cut_bytes": len(reading.torn), "cut_sha256": hashlib.sha256(reading.torn).hexdigest()}
    assert [record.seq for record in read_journal(path).records] == [1, 2, 3, 4]


def test_zeros_that_a_power_cut_leaves_are_a_torn_line(path: Path) -> None:
    written(path)
    with path.open("ab") as out:
        out.write(b'{"boot_id":"' + bytes(100) + b'"}\n')
    assert read_journal(path).torn
    assert Journal.open(path, VirtualClock()).records[-1].event is Event.JOURNAL_REPAIRED


def test_a_broken_whole_last_line_is_damage_as_it_may_have_acted(path: Path) -> None:
    """A broken last line must not be cut off: it may be the intent of a create request that was sent."""
    written(path)
    edit_lines(path, lambda lines: [*lines[:-1], lines[-1].replace(b"{", b"[", 1)])
    with refusal(JournalDamaged, "journal.damaged", "line 4"):
        Journal.open(path, VirtualClock())


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda lines: [lines[0], b"{not json", *lines[2:]], "line 2: .*JSON"),
        (lambda lines: [lines[0], lines[1].replace(b"number 1", b"number 7"), *lines[2:]], "line 3: "),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "line 2: .*3"),
        (lambda lines: [lines[0], *lines[2:]], "line 2: .*3"),
        (lambda lines: [lines[0], lines[1].replace(b'"incident"', b"7"), *lines[2:]], "line 2: event"),
    ],
    ids=["not JSON", "edited", "reordered", "removed", "no event"],
)
def test_damage_midway_names_the_line_and_stops_only_the_writer(path: Path, edit: Any, what: str) -> None:
    written(path)
    edit_lines(path, edit)
    with pytest.raises(JournalDamaged, match=what) as caught:
        Journal.open(path, VirtualClock())
    assert caught.value.exit_code is ExitCode.VERIFICATION_FAILED
    assert "gpurun destroy fox-41" in caught.value.hint
    reading = read_journal(path)
    assert reading.damage is not None
    assert len(reading.records) in (1, 2)


def test_a_journal_that_is_not_there_has_no_records(path: Path) -> None:
    assert read_journal(path).records == ()


def test_a_journal_goes_on_where_it_ended(path: Path) -> None:
    first = written(path)
    again = Journal.open(path, VirtualClock())
    assert (again.records, again.head) == (first.records, first.head)
    again.write(Event.INCIDENT, {"code": "later", "message": ""})
    assert read_journal(path).damage is None


def test_the_closing_line_is_sealed_because_none_follows_it(tmp_path: Path) -> None:
    folder = finished_run(Home(tmp_path / "home"))
    closed = read_journal(folder.journal).records[-1]
    assert closed.event is Event.RUN_CLOSED
    assert closed.data.keys() == {"exit_code", "seal"}


# A full disk ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_journal_as_it_was_and_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = written(path)
    before = path.read_bytes()
    write = os.write

    def half_then_full(descriptor: int, content: Any) -> int:
        if len(content) < 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[: len(content) // 2])

    monkeypatch.setattr(durable.os, "write", half_then_full)
    with refusal(SetupError, "disk.full", "journal.jsonl"):
        journal.write(Event.DESTROY_INTENDED, {"id": "pod-1"})
    assert path.read_bytes() == before
    monkeypatch.undo()
    journal.write(Event.DESTROY_INTENDED, {"id": "pod-1"})
    assert [record.seq for record in read_journal(path).records] == [1, 2, 3, 4, 5]


def test_a_full_disk_for_real(path: Path) -> None:
    """The kernel refuses the last bytes of a write (RLIMIT_FSIZE): later records must still be readable."""
    program = f"""
import resource
from pathlib import Path
from gpurun.core.clock import SystemClock
from gpurun.core.errors import SetupError
from gpurun.core.journal_records import Event
from gpurun.ledger.journal import Journal
journal = Journal.open(Path({str(path)!r}), SystemClock())
journal.write(Event.INCIDENT, {{"code": "first", "message": ""}})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))
try:
    journal.write(Event.INCIDENT, {{"code": "second", "message": "x" * 2000}})
except SetupError as error:
    print(error.code)
resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.RLIM_INFINITY}, {resource.RLIM_INFINITY}))
journal.write(Event.INCIDENT, {{"code": "third", "message": ""}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "disk.full\n"
    assert [record.data["code"] for record in read_journal(path).records] == ["first", "third"]


def test_short_writes_are_finished(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(durable.os, "write", lambda descriptor, content: write(descriptor, content[:7]))
    written(path)
    assert len(read_journal(path).records) == 4


def test_a_second_writer_is_noticed_instead_of_overwritten(path: Path) -> None:
    journal = written(path)
    written(path, 1)
    with refusal(VerificationFailed, "file.changed"):
        journal.write(Event.INCIDENT, {"code": "mine", "message": ""})
    assert read_journal(path).damage is None


def test_a_link_in_place_of_the_journal_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError):
        written(path, 1)
    assert not (tmp_path / "elsewhere").exists()


# A kill at every point ------------------------------------------------------------------------------------------------

_APPENDS = """
import sys
from pathlib import Path
from gpurun.core.clock import SystemClock
from gpurun.core.journal_records import Event
from gpurun.ledger.journal import Journal
journal = Journal.open(Path(sys.argv[1]), SystemClock())
while len(journal.records) < 3:
    journal.write(Event.INCIDENT, {"code": str(len(journal.records)), "message": ""})
"""


@pytest.mark.parametrize("point", range(1, 7))
def test_killed_at_any_point_it_continues_without_gap_or_double(path: Path, point: int) -> None:
    program = [sys.executable, "-c", _APPENDS, str(path)]
    killed = subprocess.run(program, env={**os.environ, "GPURUN_CRASH_AT": str(point)}, check=False)
    assert killed.returncode == -9
    assert len(read_journal(path).records) == point // 2
    subprocess.run(program, check=True)
    assert [record.data["code"] for record in read_journal(path).records] == ["0", "1", "2"]


# The disk itself -----------------------------------------------------------------------------------------------------


def test_a_good_disk_passes_the_probe_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    require_durable(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["fsync", "flock", "shared"])
def test_a_disk_without_working_fsync_or_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if broken == "fsync":
        monkeypatch.setattr(durable.os, "fsync", refuse)
    else:
        monkeypatch.setattr(filelock.fcntl, "flock", refuse if broken == "flock" else lambda *_: None)
    with refusal(SetupError, "home.not_durable"):
        require_durable(tmp_path)
    assert list(tmp_path.iterdir()) == []
