"""Tests of receipts: made from the run folder alone, with the same bytes after any crash, and never too favourable."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import SetupError, UsageError, VerificationFailed
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.receipt_record import Signature
from gpurun.ledger import fsync
from gpurun.ledger import write_receipt as receipt
from gpurun.ledger.audit import audit
from gpurun.ledger.chain import GENESIS, read_chain
from gpurun.ledger.signing import PRIVATE_NAME
from gpurun.ledger.write_receipt import read_receipt, write_receipt
from gpurun.view.receipt_screen import receipt_pairs
from tests.refusals import lacking, refusal
from tests.unit.ledger_samples import RATE, CloudRun, finished_run


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


def predicate(run: CloudRun) -> dict[str, Any]:
    write_receipt(run.home, run.folder)
    return read_receipt(run.home, run.folder).predicate


def test_it_is_an_in_toto_statement_about_the_checkpoint_files(home: Home) -> None:
    folder = finished_run(home)
    read = read_receipt(home, folder)
    assert read.signature is Signature.OK
    assert read.statement["_type"] == "https://in-toto.io/Statement/v1"
    assert read.statement["predicateType"] == "https://gpurun.dev/receipt/v1"
    names = [subject["name"] for subject in read.statement["subject"]]
    assert names == ["checkpoints/000120.model.safetensors", "checkpoints/000120.state.json"]


def test_the_cost_is_whole_units_from_before_asking_to_the_proof(home: Home) -> None:
    fields = predicate(CloudRun(home).until_gone())
    cost = fields["cost"]
    assert fields["runtime"]["billable_s"] == 3371.0
    assert cost["upper_bound_micros"] == 57 * 60 * RATE // 3600
    assert (cost["is"], cost["billed_is"], cost["cap_kept"]) == ("measured", "unknown", True)
    assert sum(fields["runtime"]["phases_s"].values()) == 3371.0


def test_the_higher_of_agreed_and_reported_price_always_counts(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created(rate_micros_per_hour=2 * RATE))
    rose = {"step": "create", "code": "price.rose", "message": "", "hint": "", "exit_code": 5}
    fields = predicate(run.write((Event.STEP_FAILED, rose)).play(run.death()))
    assert fields["cost"]["rentals"][0]["rate_micros_per_hour"] == 2 * RATE
    assert fields["cost"]["upper_bound_micros"] == 60 * 2 * RATE // 3600
    assert fields["training"]["failed_step"]["code"] == "price.rose"


def test_a_refused_create_costs_nothing_and_the_next_is_added(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended())
    refused = (Event.CREATE_REFUSED, {"token": run.token, "reason": "no_capacity", "message": "none left"})
    run.write(refused)
    run.token = "gr-fox-41-second"
    run.write(run.intended(2), run.created()).play(run.through_training(), run.death())
    fields = predicate(run)
    assert [(rental["end"], rental["micros"]) for rental in fields["cost"]["rentals"]] == [
        ("refused", 0),
        ("destroyed", 2_324_000 + 41_500),
    ]
    assert fields["timeline"]["asked"] == "2027-01-15T08:00:00.000Z"


def test_a_duplicate_machine_is_paid_for_like_the_kept_one(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended())
    run.write((Event.INCIDENT, {"code": "create.duplicate", "message": "a second instance pod-x carries the token"}))
    run.write(run.created()).play(run.through_training(), run.death())
    fields = predicate(run)
    assert fields["cost"]["rentals"][0]["machines"] == 2
    assert fields["cost"]["upper_bound_micros"] == 2 * 57 * 60 * RATE // 3600
    assert fields["incidents"][0]["code"] == "create.duplicate"


def test_a_clock_that_is_set_back_does_not_make_the_run_cheaper(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created())
    run.clock.jump_wall(-7200)
    fields = predicate(run.play(run.through_training(), run.death()))
    assert fields["runtime"]["billable_s"] == 3368.0


def test_a_restarted_laptop_counts_wall_time(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created())
    later = VirtualClock(start=run.clock.wall() + 1000 - 1e6)
    later.sleep(1e6)  # The monotonic clock of another boot is unrelated to this one's.
    run.clock = run.journal._clock = later
    run.journal._boot_id = "another boot"
    fields = predicate(run.play(run.through_training(), run.death()))
    assert fields["runtime"]["billable_s"] == 4368.0


def test_a_machine_that_is_not_proven_gone_has_no_final_cost(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created()).play(run.through_training())
    fields = predicate(run)
    assert fields["teardown"]["is"] == "not_proven"
    assert (fields["cost"]["upper_bound_micros"], fields["cost"]["is"]) == (None, "unknown")


def test_a_run_that_made_nothing_has_no_teardown_and_no_cost(home: Home) -> None:
    run = CloudRun(home)
    fields = predicate(run.write(run.opened()))
    assert (fields["teardown"]["is"], fields["instance"], fields["cost"]["upper_bound_micros"]) == (None, None, 0)


# The verdict ---------------------------------------------------------------------------------------------------------


def test_it_quotes_the_logs_machine_code_and_losses(home: Home) -> None:
    quoted = predicate(CloudRun(home).until_gone())["training"]["log"]["lines"]
    assert [line.split(" ")[0] for line in quoted] == [
        *("device:", "cuda_name:", "parameters:", "code:"), *["step"] * 3, "checkpoint:"
    ]  # fmt: skip
    assert quoted[3].startswith("code: embedding trainer/model.py:")


def test_steps_lost_to_memory_are_in_it_but_not_in_an_older_one(home: Home) -> None:
    class Warned(CloudRun):
        def write_trainer_files(self) -> None:
            super().write_trainer_files()
            lost = "step 70, micro_batch 64 became 32\u001b[31m, 10 steps"
            event = {"kind": "warning", "step": 70, "code": "memory.micro_batch", "message": lost}
            with self.folder.events.open("a") as events:
                events.write(f"{json.dumps(event)}\n" * 20)

    class Newer(Warned):
        def plan(self) -> dict[str, Any]:
            return {**super().plan(), "trainer": "official trainer 0.1.0"}

    quoted = predicate(Newer(home).until_gone())["training"]["warnings"]["lines"]
    assert len(quoted) == 8
    assert quoted[0].startswith("step 70: step 70, micro_batch 64 became 32")
    assert quoted[0].endswith("10 steps")
    assert "\x1b" not in quoted[0]
    assert "warnings" not in predicate(Warned(home, "owl-1").until_gone())["training"]


def test_a_cpu_run_is_a_smoke_test_whatever_its_sample_says(home: Home) -> None:
    run = CloudRun(home, device="cpu").until_gone()
    assert "device: cuda" in run.folder.log.read_text()
    verdict = predicate(run)["verdict"]
    assert (verdict["is"], "complete" in verdict["says"]) == ("smoke", True)


@pytest.mark.parametrize("lie", ["log", "events", "no events", "no log"])
def test_the_verdict_gpu_needs_log_and_events_to_agree(home: Home, lie: str) -> None:
    run = CloudRun(home).until_gone()
    path = run.folder.log if "log" in lie else run.folder.events
    path.write_text("" if "no" in lie else path.read_text().replace("cuda", "cpu", 1))
    assert predicate(run)["verdict"]["is"] == "smoke"


def test_a_resumed_run_that_lost_its_gpu_is_no_gpu_run(home: Home) -> None:
    run = CloudRun(home).until_gone()
    with run.folder.events.open("a") as events:
        events.write('{"kind": "start", "device": "cpu"}\n')
    assert predicate(run)["verdict"]["is"] == "smoke"


@pytest.mark.parametrize("outcome", ["stopped", "failed"])
def test_only_a_run_that_was_done_is_called_complete(home: Home, outcome: str) -> None:
    run = CloudRun(home, device="cpu")
    run.write(run.opened(), run.intended(), run.created())
    for seconds, (event, data) in run.through_training():
        run.clock.sleep(seconds)
        run.write((event, {**data, "outcome": outcome} if event is Event.TRAIN_OBSERVED else data))
    done = predicate(CloudRun(home, "owl-07", device="cpu").until_gone())["verdict"]
    assert predicate(run.play(run.death()))["verdict"]["says"] != done["says"]


def test_a_late_fetch_is_not_training_nor_a_bare_log_a_failure(home: Home) -> None:
    """The time after training is not training.

    A receipt once said both "no training was completed" and "3 m 13 s of training".
    """
    run = CloudRun(home, device="cpu")
    run.folder.log.write_text("")
    run.write(run.opened(), run.intended(), run.created())
    for seconds, (event, data) in run.through_training():
        drained = event is Event.TRAIN_OBSERVED
        run.clock.sleep(193 if drained else seconds)
        run.write((event, {**data, "drained_s": 187.0} if drained else data))
    fields = predicate(run.play(run.death()))
    assert (fields["training"]["outcome"], fields["training"]["seconds"]["train_s"]) == ("done", 6.0)
    assert "device" in fields["verdict"]["says"]
    assert fields["runtime"]["phases_s"]["training"] < 10 < 187 < fields["runtime"]["phases_s"]["collect"]


@pytest.mark.parametrize(("asleep_s", "told_s"), [(0, None), (300, 3000.0)])
def test_an_end_seen_late_has_the_machines_time_as_well(home: Home, asleep_s: int, told_s: float | None) -> None:
    """The laptop slept for five minutes after a job of 50: the receipt must also state the machine's 50 minutes."""
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created())
    began_wall = 0.0
    for seconds, (event, data) in run.through_training():
        run.clock.sleep(seconds)
        if event is Event.TRAIN_STARTED:
            began_wall = data["started_wall"]
        if event is Event.TRAIN_OBSERVED:
            data = {**data, "ended_wall": began_wall + 3000.0}
            run.clock.sleep(asleep_s)
        run.write((event, data))
    found = predicate(run.play(run.death()))
    assert found["training"]["seconds"]["train_s"] == 3001.0 + asleep_s
    assert found["training"]["seconds"].get("told_s") == told_s
    (runtime,) = [cells for name, cells in receipt_pairs(found, now=run.clock.wall(), shutdown="") if name == "Runtime"]
    assert ("50 m 00 s by" in runtime[0]) == (told_s is not None)


# The chain -----------------------------------------------------------------------------------------------------------


def test_receipts_form_one_chain(home: Home) -> None:
    folders = [finished_run(home, name) for name in ("fox-41", "owl-07", "elk-33")]
    receipts = [read_receipt(home, folder) for folder in folders]
    assert [receipt.predicate["seq"] for receipt in receipts] == [1, 2, 3]
    assert [receipt.predicate["prev"] for receipt in receipts] == [GENESIS, receipts[0].sha256, receipts[1].sha256]
    assert read_chain(home.ledger).head == receipts[2].sha256


def test_writing_it_again_changes_no_byte(home: Home) -> None:
    folder = finished_run(home)
    finished_run(home, "owl-07")
    before = (folder.receipt.read_bytes(), home.ledger.read_bytes())
    written = write_receipt(home, folder)
    assert (written.seq, written.signed) == (1, True)
    assert (folder.receipt.read_bytes(), home.ledger.read_bytes()) == before


def test_a_lost_or_damaged_receipt_is_remade_byte_for_byte(home: Home) -> None:
    folder = finished_run(home)
    finished_run(home, "owl-07")
    before = folder.receipt.read_bytes()
    folder.receipt.unlink()
    write_receipt(home, folder)
    assert folder.receipt.read_bytes() == before
    folder.receipt.write_bytes(before[:-30])
    write_receipt(home, folder)
    assert folder.receipt.read_bytes() == before


def test_a_request_after_the_end_does_not_change_the_receipt(home: Home) -> None:
    """A stop may be requested after the proof of death, before a receipt that a crash delayed.

    It must not change its bytes.
    """
    run = CloudRun(home).until_gone()
    write_receipt(home, run.folder)
    before = run.folder.receipt.read_bytes()
    run.folder.receipt.unlink()
    run.write((Event.STOP_REQUESTED, {"how": "save", "by": "user", "reason": ""}))
    run.settle()
    assert run.folder.receipt.read_bytes() == before
    assert audit(home).sound


def test_what_happens_after_it_was_observed_does_not_change_it(home: Home) -> None:
    run = CloudRun(home).until_gone().settle()
    before = run.folder.receipt.read_bytes()
    run.write((Event.INCIDENT, {"code": "create.late", "message": "pod-2", "id": "pod-2", "token": "gr-x"}))
    run.folder.receipt.unlink()
    write_receipt(home, run.folder)
    assert run.folder.receipt.read_bytes() == before


def test_a_receipt_is_not_made_anew_from_other_facts(home: Home) -> None:
    folder = finished_run(home)
    folder.receipt.unlink()
    folder.log.write_text("device: cpu\n")
    with refusal(VerificationFailed, "receipt.differs"):
        write_receipt(home, folder)
    assert not folder.receipt.exists()


def test_without_its_key_the_chain_goes_on_unsigned(home: Home) -> None:
    finished_run(home)
    (home.keys / PRIVATE_NAME).unlink()
    folder = finished_run(home, "owl-07")
    read = read_receipt(home, folder)
    assert (read.signature, read.predicate["signing"]["keyid"]) == (Signature.UNSIGNED, None)
    assert read.predicate["seq"] == 2


@pytest.mark.parametrize("tail", [b'{"prev":"00', b'{"prev":"00' + bytes(150) + b"}\n"], ids=["cut", "zeros"])
def test_the_chains_torn_last_line_is_repaired_by_the_next(home: Home, tail: bytes) -> None:
    finished_run(home)
    with home.ledger.open("ab") as ledger:
        ledger.write(tail)
    assert "next receipt" in audit(home).problems[0]
    finished_run(home, "owl-07")
    assert [link.run for link in read_chain(home.ledger).links] == ["fox-41", "owl-07"]
    assert audit(home).sound


def test_a_link_left_as_zeros_by_a_power_cut_is_retaken(home: Home) -> None:
    finished_run(home)
    run = CloudRun(home, "owl-07").until_gone()
    before = home.ledger.read_bytes()
    write_receipt(home, run.folder)
    after = home.ledger.read_bytes()
    home.ledger.write_bytes(before + bytes(len(after) - len(before) - 10) + after[-10:])
    run.settle()
    assert home.ledger.read_bytes() == after
    assert audit(home).sound


def test_a_damaged_line_of_the_chain_keeps_no_run_from_ending(home: Home) -> None:
    finished_run(home)
    finished_run(home, "owl-07")
    home.ledger.write_bytes(home.ledger.read_bytes().replace(b"prev", b"pr\xff\xff", 1))
    finished_run(home, "elk-33")
    assert read_chain(home.ledger).links[-1].seq == 3
    assert any("line 1" in problem for problem in audit(home).problems)


@pytest.mark.parametrize("step", ["receipt.json", "ledger.jsonl"])
def test_a_full_disk_leaves_nothing_half_written(home: Home, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    finished_run(home)
    run = CloudRun(home, "owl-07").until_gone()
    ledger = home.ledger.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "receipt.json":
        monkeypatch.setattr(receipt, "write_atomic", full)
    else:
        monkeypatch.setattr(fsync.os, "write", full)
    with pytest.raises(SetupError, match=step) as caught:
        write_receipt(home, run.folder)
    assert caught.value.code == "disk.full"
    assert home.ledger.read_bytes() == ledger
    monkeypatch.undo()
    run.settle()
    assert audit(home).sound


def test_an_unreadable_run_file_is_named_and_not_the_chain(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CloudRun(home, "owl-07").until_gone()
    log = run.folder.log
    log.touch()
    shut = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(log))
    monkeypatch.setattr("gpurun.ledger.log_facts.open_regular", Mock(side_effect=shut))
    with pytest.raises(SetupError) as caught:
        write_receipt(home, run.folder)
    assert lacking(caught.value.what, str(log), "Permission denied") == []


# A kill at every point ------------------------------------------------------------------------------------------------

_WRITE = """
import sys
from pathlib import Path
from gpurun.core.paths import Home
from gpurun.ledger.write_receipt import write_receipt
home = Home(Path(sys.argv[1]))
for name in sys.argv[2:]:
    write_receipt(home, home.run(name))
"""


@pytest.mark.parametrize("point", range(1, 5))
def test_killed_anywhere_the_next_call_finishes_after_any_other(home: Home, point: int) -> None:
    first, second = CloudRun(home).until_gone(), CloudRun(home, "owl-07").until_gone()
    program = [sys.executable, "-c", _WRITE, str(home.root), "fox-41"]
    killed = subprocess.run(program, env={**os.environ, "GPURUN_CRASH_AT": str(point)}, check=False)
    assert killed.returncode == -9
    left = read_chain(home.ledger).link_of("fox-41"), first.folder.receipt.exists()
    assert left[1] == (point >= 2)
    second.settle()
    first.settle()
    report = audit(home)
    assert report.sound, report
    assert {row.run: row.seq for row in report.rows} == (
        {"fox-41": 1, "owl-07": 2} if point == 4 else {"owl-07": 1, "fox-41": 2}
    )


def test_two_processes_at_once_keep_one_chain(home: Home) -> None:
    names = [f"ant-{number}" for number in range(10, 22)]
    for name in names:
        CloudRun(home, name).until_gone()
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITE, str(home.root), *some]) for some in (names[::2], names[1::2])
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    report = audit(home)
    assert report.problems == ()
    assert [row.seq for row in report.rows] == list(range(1, 13))
    assert not any(row.problems for row in report.rows)


def test_a_receipt_waits_until_the_chain_is_free(home: Home) -> None:
    run = CloudRun(home).until_gone()
    home.ledger.touch()
    writer = threading.Thread(target=write_receipt, args=(home, run.folder))
    with home.ledger.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        assert not run.folder.receipt.exists()
    writer.join()
    assert read_chain(home.ledger).head == read_receipt(home, run.folder).sha256


# Reading a receipt ----------------------------------------------------------------------------------------------------


def test_a_run_without_a_receipt_says_how_to_get_one(home: Home) -> None:
    run = CloudRun(home)
    with refusal(UsageError, "receipt.none"):
        read_receipt(home, run.folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"payload": "eyJh"}', b'{"payload": "e30="}', b"[" * 100_000])
def test_a_file_that_is_no_receipt_is_called_so(home: Home, content: bytes) -> None:
    folder = finished_run(home)
    folder.receipt.write_bytes(content)
    with refusal(VerificationFailed, "receipt.unreadable", "receipt.json"):
        read_receipt(home, folder)


def test_it_holds_no_word_of_this_machine_or_moment(home: Home, tmp_path: Path) -> None:
    """A receipt that had anything from outside the run folder could not be made again with the same bytes."""
    text = json.dumps(read_receipt(home, finished_run(home)).statement)
    assert str(tmp_path) not in text
    assert os.uname().nodename not in text
