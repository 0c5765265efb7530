"""Tests of jobs and runs on the real Slurm: slurmctld and two slurmd on loopback. Skipped where it is not installed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from datatrove.executor.slurm import SlurmPipelineExecutor

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.errors import ExitCode
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import InstanceState
from gpurun.core.run_plan import Plan
from gpurun.data.prepare import finish_preparing, prepare
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import read_journal
from gpurun.planning.own_box import LoginHere, job_machine, job_step
from gpurun.providers.base import Unknown
from gpurun.providers.slurm.provider import Site, SlurmProvider
from tests.contract.orders import order, wait_for
from tests.emulators.slurm import REASONS, form_of, missing
from tests.emulators.slurm.engine import Engine, running
from tests.later import LATER
from tests.lifecycle.slurm_engine_run import opened, seen
from tests.lifecycle.slurm_run import KILLS, LEASE
from tests.lifecycle.tiny_runs import drive, start
from tests.unit.executors import WORDS, begun_of, content, steps
from tests.unit.executors import order as order_of

CLOCK = SystemClock()
pytestmark = [LATER, pytest.mark.skipif(bool(missing()), reason=missing() or "it is here")]


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("slurm") / "root") as made:
        yield made


def waited(provider: SlurmProvider, instance_id: str, state: InstanceState, within_s: float) -> float:
    begun = time.monotonic()
    for _ in ticks(CLOCK, 0.5, within_s):
        if provider.read(instance_id).state is state:
            return time.monotonic() - begun
    raise AssertionError(f"{provider.read(instance_id)} is not {state} after {within_s} s")


def test_one_job_of_a_name_runs_at_a_time_and_goes_with_its_node(engine: Engine) -> None:
    provider = SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK)
    assert "(probe)" in provider.verify().identity
    wish = order(provider, lease_s=600)
    first, second = provider.create(wish), provider.create(wish)
    waited(provider, first.id, InstanceState.RUNNING, 20)
    assert provider.read(second.id).state is InstanceState.PENDING
    (found, _) = provider.find(wish.token)
    assert (found.run, found.deadline_wall, found.region) == ("fox-41", wish.deadline_wall, "lab")
    assert provider.read("lab/9999").state is InstanceState.GONE
    for instance in (second, first):
        provider.destroy(instance.id)
        provider.destroy(instance.id)
    waited(provider, first.id, InstanceState.GONE, 40)
    assert provider.read(second.id).state is InstanceState.GONE


def test_a_steps_secrets_are_in_no_file_of_the_shared_disk(engine: Engine, tmp_path: Path) -> None:
    provider = SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK)
    made = provider.create(order(provider, lease_s=600))
    waited(provider, made.id, InstanceState.RUNNING, 20)
    step = job_step(engine.cluster, provider.read(made.id), Home(tmp_path / "home").prepare(), CLOCK)
    done = step.call(
        ["sh", "-c", 'grep -rl canary . ; cat; echo " in job $SLURM_JOB_ID"'], stdin=[b"canary"], timeout_s=60
    )
    assert (done.exit_code, done.stdout.decode()) == (0, f"canary in job {made.id.partition('/')[2]}\n")
    assert [path for path in engine.work.rglob("*") if path.is_file() and b"canary" in path.read_bytes()] == []


def test_an_overdue_job_that_ignores_term_is_ended_by_slurm(engine: Engine, tmp_path: Path) -> None:
    provider, home = SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK), Home(tmp_path / "home").prepare()
    made = provider.create(order(provider, lease_s=90))
    waited(provider, made.id, InstanceState.RUNNING, 20)
    assert made.address is not None
    job = job_machine(engine.cluster, made.address.folder, made.token, home, CLOCK)
    stubborn = "trap '' TERM HUP; echo $$ >stubborn; while :; do sleep 1; done"
    job.call(["sh", "-c", 'setsid sh -c "$0" </dev/null >/dev/null 2>&1 &', stubborn], timeout_s=10)
    pid_file = Path(made.address.folder) / "stubborn"
    for _ in ticks(CLOCK, 0.2, 10):
        if pid_file.exists():
            break
    lived_s = waited(provider, made.id, InstanceState.GONE, 150)
    assert 45 <= lived_s <= 60 + LEASE.kill_allowance_s, "its time is the lease of 90 s in whole minutes"
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()


def test_a_stopped_controller_says_nothing_and_forgets_nothing(engine: Engine) -> None:
    provider = SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK)
    made = provider.create(order(provider, lease_s=600))
    waited(provider, made.id, InstanceState.RUNNING, 20)
    engine.controller.send_signal(signal.SIGTERM)
    engine.controller.wait()
    with pytest.raises(Unknown):
        provider.read(made.id)
    engine.controller = engine.start("slurmctld", "-D", "-f", str(engine.conf))
    for _ in ticks(CLOCK, 0.5, 30):
        try:
            wait_for(provider, made, InstanceState.RUNNING)
            break
        except Unknown:
            continue


@pytest.mark.parametrize(
    ("partition", "nodes", "reason"),
    [("shut", 1, *REASONS["waits without accounting"]), ("small", 2, "PartitionNodeLimit")],
)
def test_a_job_not_admitted_is_known_by_slurms_own_words(
    engine: Engine, partition: str, nodes: int, reason: str
) -> None:
    provider = SlurmProvider([Site(replace(engine.cluster, partition=partition), LoginHere())], CLOCK)
    wish = order(provider)
    offer = wish.offer.model_copy(update={"nodes": nodes})
    made = provider.create(wish.model_copy(update={"offer": offer}))
    for _ in ticks(CLOCK, 0.5, 60):  # Another scheduler of Slurm may first give another reason.
        if error := provider.never_runs(provider.read(made.id)):
            assert re.search(form_of(reason), error.what), error.what
            return
    raise AssertionError(provider.read(made.id).said)


def test_a_set_up_that_fails_ends_the_job_on_the_real_engine(engine: Engine) -> None:
    provider = SlurmProvider([Site(replace(engine.cluster, setup="no-such-module load cuda/12.8"), LoginHere())], CLOCK)
    made = provider.create(order(provider))
    waited(provider, made.id, InstanceState.GONE, 20)
    error = provider.never_runs(provider.read(made.id))
    assert error is not None
    assert (error.code, "no-such-module: command not found" in error.what) == ("setup.failed", True)


def check_one_job(engine: Engine, home: Home, folder: RunFolder) -> None:
    """Assert that there is at most one job, its death was proven once, its folder is gone, and the audit passes."""
    assert [row.problems for row in audit(home).rows] == [()]
    found = SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK).find(None)
    assert len(found) <= 1
    assert list(engine.work.iterdir()) == []
    events = [record.event for record in read_journal(folder.journal).records]
    assert events.count(Event.DEATH_PROVEN) == 1


@pytest.mark.parametrize("record", KILLS)
def test_on_real_slurm_a_killed_supervisor_ends_with_one_job(engine: Engine, tmp_path: Path, record: str) -> None:
    home = Home(tmp_path / "home")
    folder = opened(engine, home, 30)
    assert drive(home, GPURUN_CRASH_AT=f"after {record}").returncode == -9
    again = start(home)  # gpurun first waits for as long as a sent sbatch may try.
    _, errors = again.communicate(timeout=300)
    assert again.returncode == ExitCode.DONE, errors
    check_one_job(engine, home, folder)


PHASES = (Event.CREATE_INTENDED, Event.CREATE_OBSERVED, Event.TRAIN_STARTED, Event.DESTROY_INTENDED)


@pytest.mark.parametrize("phase", PHASES)
def test_a_controller_away_in_any_phase_loses_nothing(engine: Engine, tmp_path: Path, phase: Event) -> None:
    home = Home(tmp_path / "home")
    folder = opened(engine, home, 30)
    driven = start(home)
    seen(folder, phase)
    engine.stop_controller(60)
    _, errors = driven.communicate(timeout=300)
    if driven.returncode == ExitCode.MAY_BE_BILLING:  # A supervisor would try again.
        driven = start(home)
        _, errors = driven.communicate(timeout=300)
    assert driven.returncode == ExitCode.DONE, errors
    check_one_job(engine, home, folder)


def test_a_failing_node_ends_the_run_as_lost_and_proven_dead(engine: Engine, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    folder = opened(engine, home, 100_000)
    driven = start(home)
    seen(folder, Event.TRAIN_STARTED)
    engine.break_node()
    _, errors = driven.communicate(timeout=300)
    assert driven.returncode == ExitCode.TRAINING_FAILED, errors
    check_one_job(engine, home, folder)
    observed = next(record for record in read_journal(folder.journal).records if record.event is Event.TRAIN_OBSERVED)
    assert (observed.data["outcome"], "NODE_FAIL" in observed.data["message"]) == ("lost", True)
    assert list(folder.artifacts.rglob("*.safetensors")), "what was finished comes from its folder"


def test_datatrove_jobs_make_the_same_shards_byte_for_byte(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "_from_tiktoken", lambda: None)
    (corpus := tmp_path / "corpus").mkdir()
    for number in range(2):
        rows = [{"text": " ".join(Random(seed).choices(WORDS, k=200))} for seed in range(number * 40, number * 40 + 50)]
        (corpus / f"{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    wanted = order_of(corpus, engine.work / "shards")
    begun = begun_of(wanted)
    settings = {"time": "00:10:00", "partition": "main", "sbatch_args": {"mem-per-cpu": "200M"}}
    logs = str(engine.work / "logs")
    with monkeypatch.context() as patched:  # Only in this block: the engine restores PATH.
        patched.setenv("PATH", f"{os.environ['PATH']}:{Path(sys.executable).parent}")
        patched.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        SlurmPipelineExecutor(steps(begun), tasks=len(begun.left), logging_dir=logs, **settings).run()
    for _ in ticks(CLOCK, 0.5, 240):
        if not subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout:
            break
    finish_preparing(wanted, begun_of(wanted), print)
    prepare(order_of(corpus, tmp_path / "ours"), print)
    assert content(engine.work / "shards") == content(tmp_path / "ours")


SMALL = ("model.dropout=0", "train.batch_tokens=1024", "train.checkpoint_every=10", "sample.tokens=1")


def training(engine: Engine, home: Home, gpu: str, run: str, steps: int) -> subprocess.Popen[bytes]:
    """Start `gpurun train` of a small PyTorch model on Slurm; `gpu` is the value of `--gpu`, such as `2xcpu`."""
    home.prepare()
    home.config.write_text(f'[slurm.lab]\nhost = "local"\nworkdir = "{engine.work}"\npython = "{sys.executable}"\n')
    words = [word for setting in (*SMALL, f"train.steps={steps}") for word in ("--set", setting)]
    command = ["train", "mini-gpt", "--provider", "slurm", "--gpu", gpu, "--name", run, "--yes", *words]
    return subprocess.Popen(
        [sys.executable, "-m", "gpurun", *command], env={**os.environ, "GPURUN_HOME": str(home.root)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def last_loss(events: Path) -> float:
    """Return the training loss of the last step."""
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    return float(next(event["loss"] for event in reversed(lines) if event["kind"] == "step"))


def test_one_node_and_two_reach_the_loss_of_two_processes_here(engine: Engine, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    for gpu, run in (("2xcpu", "two-1"), ("cpu", "one-1")):
        assert training(engine, home, gpu, run, 20).wait(timeout=300) == ExitCode.DONE
    folder, own = home.run("two-1"), tmp_path / "own"
    ready = next(record for record in read_journal(folder.journal).records if record.event is Event.READY_OBSERVED)
    assert [node["name"] for node in ready.data["network"]["nodes"]] == ["n1", "n2"]
    assert ready.data["network"]["gigabytes_per_s"] > 0
    plan = Plan.from_json(folder.plan.read_bytes())
    (tmp_path / "recipe.json").write_text(json.dumps(plan.job.resolved))
    data = plan.data.folder if Path(plan.data.folder).is_absolute() else str(folder.path / plan.data.folder)
    words = ["--processes", "2", "--recipe", str(tmp_path / "recipe.json"), "--data", data, "--out", str(own)]
    subprocess.run([sys.executable, "-m", "trainer.launch", *words], check=True, stdout=subprocess.DEVNULL)
    here = last_loss(own / "events.jsonl")
    assert last_loss(folder.events) == pytest.approx(here, abs=1e-6)
    assert last_loss(home.run("one-1").events) == pytest.approx(here, abs=1e-6)
    assert [row.problems for row in audit(home).rows] == [(), ()]


def test_a_failing_second_node_is_lost_with_checkpoints_here(engine: Engine, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    training_two, folder = training(engine, home, "2xcpu", "two-1", 2000), home.run("two-1")
    for _ in ticks(CLOCK, 0.2, 180):
        if list(folder.artifacts.rglob("*.model.safetensors")):
            break
    engine.break_second_node()
    assert training_two.wait(timeout=400) == ExitCode.TRAINING_FAILED
    observed = next(record for record in read_journal(folder.journal).records if record.event is Event.TRAIN_OBSERVED)
    assert (observed.data["outcome"], "NODE_FAIL" in observed.data["message"]) == ("lost", True)
    assert list(folder.artifacts.rglob("*.model.safetensors"))
    check_one_job(engine, home, folder)
