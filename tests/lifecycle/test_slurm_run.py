"""Tests of whole runs as jobs of a scripted Slurm, with real processes and the real agent: always exactly one job."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.command import Command
from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import STAMPS_S, Event
from gpurun.core.money import cost_of, usd
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Choices, Plan, Request
from gpurun.core.stop_request import ask_to_stop
from gpurun.core.sweep import make_sweep
from gpurun.core.transfer_progress import read_moving
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import read_journal
from gpurun.ledger.runs import create_run, look_at_run
from gpurun.ledger.signing import payload_of
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.artifacts import on_demand
from gpurun.lifecycle.reaper import sweep_leftovers
from gpurun.planning.own_box import LoginHere
from gpurun.planning.place import Desk
from gpurun.planning.planner import make_plan
from gpurun.planning.sweep_proposal import sweep_proposal
from gpurun.providers.slurm import provider as provider_module
from gpurun.providers.slurm.provider import Site, SlurmProvider
from gpurun.readers.run_status import run_row
from gpurun.remote.client import FarSide
from gpurun.remote.key_pairs import make_keys
from gpurun.remote.machine_facts import LinkSpeed, Node
from gpurun.view.event_text import tell_record
from tests.changed_plan import changed_plan
from tests.command_line import gpurun
from tests.emulators import sshd
from tests.emulators.slurm import ScriptedSlurm, scripted_slurm
from tests.lifecycle.drive import tiny_python
from tests.lifecycle.slurm_run import (
    CLOCK,
    KILLS,
    LEASE,
    SHARD,
    begin,
    check_promises,
    drive,
    ended,
    events_of,
    failure_of,
    home,
    opened,
    slurm,
)
from tests.lifecycle.tiny_runs import trainer_events
from tests.plan_makers import make_command_plan
from tests.refusals import lacking

__all__ = ["home", "slurm"]


def test_a_run_is_one_job_that_trains_comes_home_and_is_gone(home: Home, slurm: ScriptedSlurm) -> None:
    folder = opened(home, slurm, price=usd(36))
    slurm.set("hold", "Priority")
    child, begun_mono = begin(home), CLOCK.monotonic()
    shard = f"*/data/{SHARD}"
    for _ in ticks(CLOCK, 0.05, 20):
        if list(slurm.work.glob(shard)):
            break
    assert stat.S_IMODE(next(slurm.work.iterdir()).stat().st_mode) == 0o700
    CLOCK.sleep(1.5)
    row, waits = run_row(look_at_run(home, "fox-41"), CLOCK.wall()), read_moving(folder, CLOCK.wall())
    assert (row.state, row.dies_wall, "start" in row.dies_by) == ("queued", None, True)
    assert waits is not None
    assert waits.words == "queued: Priority · place 3 of 3 in main"
    slurm.clear("hold")
    assert ended(child, home) == ExitCode.DONE
    check_promises(home, folder, slurm)
    ready = next(record for record in read_journal(folder.journal).records if record.event is Event.READY_OBSERVED)
    shipped = next(record for record in read_journal(folder.journal).records if record.event is Event.SHIP_OBSERVED)
    assert (shipped.data["sent_bytes"], ready.data["sent_bytes"] > 0) == (0, True)
    instance = ready.data["instance"]
    assert instance["started_wall"] - instance["created_wall"] > 1
    receipt = json.loads(payload_of(json.loads(folder.receipt.read_bytes())))["predicate"]
    assert receipt["teardown"]["is"] == "released"
    assert receipt["shipping"]["by_ssh_bytes"] == ready.data["sent_bytes"]
    (paid,) = receipt["cost"]["rentals"]
    assert paid["billable_s"] < CLOCK.monotonic() - begun_mono - 1.5 + STAMPS_S
    assert receipt["cost"]["upper_bound_micros"] == cost_of(usd(36), paid["billable_s"]) > 0
    assert receipt["cost"]["cap_kept"]


def test_two_nodes_are_one_job_that_starts_and_saves_together(home: Home, slurm: ScriptedSlurm) -> None:
    folder = opened(home, slurm, nodes=2, steps=3000, step_s=0.02)
    child = begin(home)
    for _ in ticks(CLOCK, 0.05, 30):
        if folder.events.exists() and '"step"' in folder.events.read_text():
            break
    ask_to_stop(folder, "save", by="user", reason="a test")
    assert ended(child, home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    check_promises(home, folder, slurm)
    stop = trainer_events(folder)[-1]
    assert stop["reason"] == "signal"  # A srun that is asked to end kills the trainer before it can save.
    assert (folder.artifacts / f"checkpoints/{stop['step']:06d}.model.safetensors").exists()
    assert "--nodes=2" in slurm.options_of("1")
    records = read_journal(folder.journal).records
    ready = next(record for record in records if record.event is Event.READY_OBSERVED)
    assert [node["name"] for node in ready.data["network"]["nodes"]] == ["n1", "n2"]
    assert lacking(tell_record(ready), "2 nodes", "0.5 GB/s") == []
    receipt = payload_of(json.loads(folder.receipt.read_bytes()))
    assert json.loads(receipt)["predicate"]["instance"]["nodes"] == 2


def test_a_job_with_a_node_too_few_trains_nothing(
    home: Home, slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = LinkSpeed(nodes=(Node(name="n1", devices=()),), backend="gloo", seconds=1.0, gigabytes_per_s=None)
    monkeypatch.setattr(FarSide, "measure", lambda *_, **__: alone)
    folder = opened(home, slurm, nodes=2)
    assert drive(home) == ExitCode.NO_OFFER
    assert failure_of(folder)["code"] == "nodes.fewer"
    assert Event.TRAIN_STARTED not in events_of(folder)


@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())
def test_a_login_node_over_ssh_is_all_that_is_reached(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    option = f'ForceCommand export PATH={slurm.bin}:$PATH; eval "$SSH_ORIGINAL_COMMAND"'
    server = sshd.Sshd(
        tmp_path / "sshd", host_keys=[tmp_path / "keys/host"], authorized_keys=[keys.client_public], options=[option]
    )
    try:
        way = f'host = "127.0.0.1"\nport = {server.port}\nuser = "{server.user}"\nidentity = "{tmp_path}/keys/client"'
        home.config.write_text(home.config.read_text().replace('host = "local"', way))
        folder = opened(home, slurm)
        assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
        check_promises(home, folder, slurm)
    finally:
        server.close()


@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())
def test_a_login_node_that_refuses_the_key_shows_the_line_to_add(home: Home, tmp_path: Path) -> None:
    (key, _), (host, let_in) = (
        (tmp_path / name, make_keys(tmp_path / name).client_public) for name in ("own", "another")
    )
    server = sshd.Sshd(tmp_path / "sshd", host_keys=[host / "host"], authorized_keys=[let_in])
    table = {"host": "127.0.0.1", "user": server.user, "identity": key / "client", "workdir": "/scratch/me"}
    lines = "".join(f'{name} = "{value}"\n' for name, value in table.items())
    home.config.write_text(f"[slurm.lab]\n{lines}port = {server.port}\n")
    line = (key / "client.pub").read_text().split()[1]
    try:
        for words in (("plan", "mini-gpt", "--provider", "slurm", "--gpu", "cpu"), ("doctor", "--online")):
            refused = gpurun(*words, "--json", "--home", str(home.root))
            assert (refused.returncode, line in refused.stdout) == (ExitCode.SETUP, True), refused.stdout
    finally:
        server.close()


@pytest.mark.parametrize("is_here", [True, False], ids=["here", "over its login node"])
@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())
def test_a_person_gets_into_a_job_as_a_step_of_it(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, is_here: bool
) -> None:
    keys = make_keys(tmp_path / "keys")
    option = f'ForceCommand export PATH={slurm.bin}:$PATH; eval "$SSH_ORIGINAL_COMMAND"'
    server = sshd.Sshd(
        tmp_path / "sshd", host_keys=[tmp_path / "keys/host"], authorized_keys=[keys.client_public], options=[option]
    )
    way = f'host = "127.0.0.1"\nport = {server.port}\nuser = "{server.user}"\nidentity = "{tmp_path}/keys/client"'
    if not is_here:
        home.config.write_text(home.config.read_text().replace('host = "local"', way))
    folder = opened(home, slurm, steps=100_000)
    child = begin(home)
    try:
        for _ in ticks(CLOCK, 0.05, 20):
            if any(event is Event.TRAIN_STARTED for event in events_of(folder)):
                break
        words = [
            sys.executable,
            "-m",
            "gpurun",
            "ssh",
            "fox-41",
            "--",
            "sh",
            "-c",
            'pwd; echo "$1"; exit 7',
            "x",
            "a  b",
        ]
        env = {**os.environ, "GPURUN_HOME": str(home.root)}
        done = subprocess.run(words, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
        (job,) = slurm.work.iterdir()
        assert (done.stdout, done.returncode) == (f"{job}\na  b\n", 7), done.stderr
        assert "bundle/work" in (slurm.state / "steps").read_text(), "it was srun that has run it"
        refused = gpurun("forward", "fox-41", "8888", "--home", str(home.root))
        assert (refused.returncode, "cluster" in refused.stderr) == (2, True)
    finally:
        ask_to_stop(folder, "destroy", by="user", reason="seen")
        ended(child, home)
        server.close()


@pytest.mark.parametrize("record", KILLS)
def test_a_supervisor_killed_and_resumed_has_one_job_and_exit_0(home: Home, slurm: ScriptedSlurm, record: str) -> None:
    folder = opened(home, slurm)
    assert drive(home, GPURUN_CRASH_AT=f"after {record}") == -9
    assert drive(home) == ExitCode.DONE
    check_promises(home, folder, slurm)


@pytest.mark.parametrize("hold", ["", "JobHeldAdmin"])
def test_a_requeued_job_is_lost_and_trains_no_second_time(home: Home, slurm: ScriptedSlurm, hold: str) -> None:
    folder = opened(home, slurm, steps=100_000)
    child = begin(home)
    for _ in ticks(CLOCK, 0.05, 20):
        if folder.events.exists() and any(event["kind"] == "checkpoint" for event in trainer_events(folder)):
            break
    if hold:
        slurm.set("hold", hold)
    slurm.set("requeue")
    assert ended(child, home) == ExitCode.TRAINING_FAILED
    assert at_home(folder), "what was finished comes from the folder"
    assert slurm.jobs == ["1"]
    assert [event["kind"] for event in trainer_events(folder)].count("start") == 1
    assert events_of(folder).count(Event.DEATH_PROVEN) == 1
    assert [row.problems for row in audit(home).rows] == [()]


def away(home: Home, slurm: ScriptedSlurm, *, steps: int, until: str) -> RunFolder:
    """Kill the run's supervisor when it trains, wait until its job has written a file, and return the run's folder."""
    folder = opened(home, slurm, steps=steps)
    assert drive(home, GPURUN_CRASH_AT="after train.started") == -9
    for _ in ticks(CLOCK, 0.05, 20):
        if list(slurm.work.glob(f"*/{until}")):
            break
    return folder


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set this computer's wall clock two hours ahead, long past the lease."""
    wall = SystemClock.wall
    monkeypatch.setattr(SystemClock, "wall", lambda clock: wall(clock) + 7200)


def at_home(folder: RunFolder) -> set[str]:
    """Return the names of the checkpoint files in the run's artifacts."""
    return {path.name for path in folder.artifacts.rglob("*.safetensors")}


def test_a_training_done_while_the_laptop_slept_comes_home(
    home: Home, slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "IDLE_S", 1)
    folder = away(home, slurm, steps=30, until="agent/exit.json")
    for _ in ticks(CLOCK, 0.1, 20):
        if (slurm.state / "jobs" / "1" / "word").exists():
            break
    assert (slurm.state / "jobs" / "1" / "word").read_text() == "COMPLETED", "its node is given back"
    assert drive(home) == ExitCode.DONE
    assert at_home(folder)
    assert list(slurm.work.iterdir()) == []
    assert [row.problems for row in audit(home).rows] == [()]


@pytest.mark.parametrize("by", ["resume", "reap"])
def test_finished_files_come_home_at_the_limit_before_cleanup(
    home: Home, slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    folder = away(home, slurm, steps=100_000, until="out/MANIFEST.json")
    slurm.end_job("1", "TIMEOUT")
    late(monkeypatch)
    if by == "resume":
        assert drive(home) == ExitCode.BUDGET_STOP
    else:
        assert sweep(home, slurm, remove_all=False) == ["removed"]
    assert at_home(folder)
    assert list(slurm.work.iterdir()) == []
    assert events_of(folder).count(Event.SALVAGE_OBSERVED) == 1
    assert [row.problems for row in audit(home).rows] == [()]


def test_an_unreadable_folder_goes_only_when_the_user_says_so(
    home: Home, slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "PATIENCE_S", 0.5)
    folder = away(home, slurm, steps=100_000, until="out/MANIFEST.json")
    slurm.end_job("1", "TIMEOUT")
    late(monkeypatch)
    config = home.config.read_text()
    home.config.write_text(config.replace("tiny-python", "no-python"))
    assert drive(home) == ExitCode.BUDGET_STOP
    assert not at_home(folder)
    (left,) = slurm.work.iterdir()
    incidents = [record.data for record in read_journal(folder.journal).records if record.event is Event.INCIDENT]
    assert [incident["code"] for incident in incidents][-1] == "folder.kept"
    assert left.name in incidents[-1]["message"]
    assert sweep(home, slurm, remove_all=False) == ["kept"]
    assert (left / "out" / "MANIFEST.json").exists()
    home.config.write_text(config)
    monkeypatch.setenv("GPURUN_HOME", str(home.root))
    assert gpurun("collect", "fox-41", "--only", "all").returncode == ExitCode.DONE
    assert at_home(folder)
    assert sweep(home, slurm, remove_all=True) == ["removed"]
    assert list(slurm.work.iterdir()) == []


def sweep(home: Home, slurm: ScriptedSlurm, *, remove_all: bool) -> list[str]:
    """Return what `reap` did with each folder of a run on the cluster."""
    provider = SlurmProvider([Site(slurm.cluster, LoginHere())], CLOCK)
    found = sweep_leftovers([provider], home, CLOCK, remove_all=remove_all, look_only=False)
    return [stray.fate for stray in found]


def test_a_command_runs_as_a_job_with_its_secret_off_shared_disk(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab := tmp_path / "lab").mkdir()
    (lab / "train.sh").write_text('grep -rlF "$MY_TOKEN" "${PWD%/*}" >found; echo "${#MY_TOKEN} letters" >length.txt\n')
    monkeypatch.setenv("MY_TOKEN", "canary-77")
    command = Command(argv=("sh", "train.sh"), folder=str(lab), outputs=("length.txt", "found"), secrets=("MY_TOKEN",))
    choices = Choices(accept_cpu=True, max_gpu_hours=1)
    need = GpuNeed(count=0, name="cpu")
    request = Request(recipe="", providers=("slurm",), gpu=need, command=command, choices=choices)
    plan = make_command_plan(request, run="fox-41", home=home, clock=CLOCK, say=print)
    assert plan.lease.total_s + plan.lease.kill_allowance_s == 3600
    folder = create_run(home, request, plan)
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    outputs = {path.name: path.read_text() for path in (folder.artifacts / "outputs").iterdir()}
    assert outputs == {"length.txt": "9 letters\n", "found": ""}
    assert "agent.pyz secrets" in (slurm.state / "steps").read_text()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and b"canary-77" in path.read_bytes()] == []
    assert [row.problems for row in audit(home).rows] == [()]


def test_a_sweep_is_one_job_whose_trials_share_its_node(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    (lab := tmp_path / "lab").mkdir()
    (lab / "train.sh").write_text('echo "step 1/1 loss $1"; echo "$1" >weights.txt\n')
    command = Command(argv=("sh", "train.sh", "{lr}"), folder=str(lab), outputs=("*.txt",))
    sweep = make_sweep({"lr": ("3", "1", "2", "4")}, {"at_once": 2})
    choices, need = Choices(accept_cpu=True, max_gpu_hours=1), GpuNeed(count=0, name="cpu")
    request = Request(recipe="", providers=("slurm",), gpu=need, command=command, choices=choices, sweep=sweep)
    proposal = sweep_proposal(request, Desk("fox-41", home, CLOCK, print), is_asked=False, admit=lambda _: None)
    folder = create_run(home, request, make_plan(proposal))
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    trials = read_receipt(home, folder).predicate["training"]["trials"]
    assert [(row["params"]["lr"], row["state"]) for row in trials["rows"]] == [
        ("3", "done"), ("1", "done"), ("2", "done"), ("4", "done"),
    ]  # fmt: skip
    assert (folder.artifacts / "outputs/gpurun-sweep/best/002/weights.txt").read_text() == "1\n"
    assert [row.problems for row in audit(home).rows] == [()]


def test_a_command_runs_and_is_told_of_a_stop_on_every_node(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    (lab := tmp_path / "lab").mkdir()
    (lab / "train.sh").write_text(
        'trap "echo saved >$NODE_RANK.txt; exit 0" USR1\n'
        'echo "node $PET_NODE_RANK of $PET_NNODES, $MASTER_ADDR:$MASTER_PORT is $PET_MASTER_ADDR:$PET_MASTER_PORT"\n'
        "while :; do sleep 0.05; done\n"
    )
    command = Command(argv=("sh", "train.sh"), folder=str(lab), outputs=("*.txt",), stop_signal="USR1")
    choices, need = Choices(accept_cpu=True), GpuNeed(count=0, name="cpu", nodes=2)
    request = Request(recipe="", providers=("slurm",), gpu=need, command=command, choices=choices)
    folder = create_run(home, request, make_command_plan(request, run="fox-41", home=home, clock=CLOCK, say=print))
    child = begin(home)
    for _ in ticks(CLOCK, 0.05, 30):
        if folder.log.exists() and folder.log.read_text().count("node ") == 2:
            break
    ask_to_stop(folder, "save", by="user", reason="a test")
    assert ended(child, home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    lines = sorted(line for line in folder.log.read_text().splitlines() if line.startswith("node "))
    assert [line.partition(",")[0] for line in lines] == ["node 0 of 2", "node 1 of 2"]
    (leader,) = {line.partition(", ")[2] for line in lines}
    assert leader.partition(" is ")[0] == leader.partition(" is ")[2]
    assert sorted(path.name for path in (folder.artifacts / "outputs").iterdir()) == ["0.txt", "1.txt"]
    assert [row.problems for row in audit(home).rows] == [()]


def test_a_table_that_leads_to_another_cluster_proves_no_death(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path
) -> None:
    folder = opened(home, slurm, steps=100_000)
    assert drive(home, GPURUN_CRASH_AT="after train.started") == -9
    before = home.config.read_text()
    (other := tmp_path / "other").mkdir()
    with scripted_slurm(other) as another:
        another.set("name", "other")
        ask_to_stop(folder, "destroy", by="user", reason="a test")
        assert drive(home) == ExitCode.MAY_BE_BILLING
        assert "account.other" in (home.root / "driven.txt").read_text()
    assert Event.DEATH_PROVEN not in events_of(folder)
    assert home.config.read_text() == before
    assert drive(home) == ExitCode.INTERRUPTED
    assert (slurm.state / "jobs" / "1" / "word").read_text() == "CANCELLED"
    assert [row.problems for row in audit(home).rows] == [()]


def test_a_hint_says_that_the_workdir_may_not_be_shared(home: Home, slurm: ScriptedSlurm) -> None:
    folder = opened(home, slurm)
    slurm.set("hold", "Priority")
    child = begin(home)
    for _ in ticks(CLOCK, 0.05, 20):
        if list(slurm.work.glob(f"*/data/{SHARD}")):
            break
    (slurm.state / "jobs" / "1" / "command").write_text("/nowhere/pilot.sh")
    slurm.clear("hold")
    assert ended(child, home) == ExitCode.NO_OFFER
    failed = next(record for record in read_journal(folder.journal).records if record.event is Event.STEP_FAILED)
    assert "FAILED" in failed.data["message"]
    assert "share" in failed.data["hint"]


def test_an_upload_longer_than_the_queue_ends_once_the_job_runs(home: Home, slurm: ScriptedSlurm) -> None:
    folder = opened(home, slurm)
    slurm.set("hold", "Priority")
    child = begin(home, GPURUN_CRASH_AT="before far.settle")  # All parts are uploaded, and `settle` comes next.
    assert ended(child, home) == -9
    slurm.clear("hold")
    assert drive(home) == ExitCode.DONE
    check_promises(home, folder, slurm)


def test_a_full_disk_on_the_cluster_ends_the_job_in_its_queue(home: Home, slurm: ScriptedSlurm) -> None:
    folder = opened(home, slurm)
    slurm.set("hold", "Priority")
    python = home.root / "full-python"
    refusal = '{"error": {"code": "disk_full", "message": "no space left"}}'
    python.write_text(
        f"""#!/bin/sh\ncase "$*" in *begin*) echo '{refusal}'; exit 3;; esac\nexec {tiny_python(home.root)} "$@"\n"""
    )
    python.chmod(0o755)
    home.config.write_text(home.config.read_text().replace(str(tiny_python(home.root)), str(python)))
    assert drive(home) == ExitCode.SETUP
    assert (slurm.state / "jobs" / "1" / "started").exists() is False
    assert Event.READY_OBSERVED not in events_of(folder)
    assert list(slurm.work.iterdir()) == []


def test_a_job_that_can_never_begin_is_cancelled_at_no_cost(home: Home, slurm: ScriptedSlurm) -> None:
    folder = opened(home, slurm, price=usd(36))
    plan = Plan.from_json(folder.plan.read_bytes())
    folder.plan.write_text(changed_plan(plan, {"lease": LEASE.model_copy(update={"boot_s": 1})}).to_json())
    slurm.set("hold", "QOSMaxGRESPerUser")
    assert drive(home) == ExitCode.NO_OFFER
    assert (slurm.state / "jobs" / "1" / "word").read_text() == "CANCELLED"
    assert events_of(folder).count(Event.DEATH_PROVEN) == 1
    receipt = json.loads(payload_of(json.loads(folder.receipt.read_bytes())))["predicate"]
    assert receipt["cost"]["upper_bound_micros"] == 0
    assert [row.problems for row in audit(home).rows] == [()]


def test_a_job_not_admitted_ends_at_once_with_slurms_reason(home: Home, slurm: ScriptedSlurm) -> None:
    folder = opened(home, slurm, price=usd(36))
    slurm.set("hold", "Job's account not permitted to use this partition (gpu allows lab not me)")
    began_s = time.monotonic()
    assert drive(home) == ExitCode.NO_OFFER
    assert time.monotonic() - began_s < LEASE.boot_s, "it waited for what never comes"
    failure = failure_of(folder)
    assert failure["code"] == "slurm.not_admitted"
    assert "gpu allows lab not me" in failure["message"]
    assert (slurm.state / "jobs" / "1" / "word").read_text() == "CANCELLED"
    assert [row.problems for row in audit(home).rows] == [()]


def test_a_failing_set_up_ends_the_run_with_its_last_words(home: Home, slurm: ScriptedSlurm) -> None:
    folder = opened(home, slurm)
    home.config.write_text(home.config.read_text() + "setup = 'echo no such module; module load cuda/12.8'\n")
    assert drive(home) == ExitCode.SETUP
    failure = failure_of(folder)
    assert failure["code"] == "setup.failed"
    assert "no such module\n" in failure["message"]
    assert "no such module\n" in folder.table_setup_log.read_text()
    assert Event.READY_OBSERVED not in events_of(folder)
    assert [row.problems for row in audit(home).rows] == [()]


def test_what_the_set_up_of_a_job_said_is_kept_and_shown(
    home: Home, slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(home, slurm)
    home.config.write_text(home.config.read_text() + "setup = 'echo loaded cuda/12.8 >&2; export NCCL_DEBUG=INFO'\n")
    assert drive(home) == ExitCode.DONE
    monkeypatch.setenv("GPURUN_HOME", str(home.root))
    assert gpurun("logs", "fox-41", "--setup").stdout == "loaded cuda/12.8\n"


def test_a_job_ended_in_the_queue_costs_and_trains_nothing(home: Home, slurm: ScriptedSlurm) -> None:
    folder = opened(home, slurm)
    slurm.set("hold", "DEADLINE")
    assert drive(home) == ExitCode.NO_OFFER
    assert slurm.jobs == ["1"]
    assert Event.READY_OBSERVED not in events_of(folder)
    assert list(slurm.work.iterdir()) == []
