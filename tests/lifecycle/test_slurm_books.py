"""The real Slurm with its accounting: receipts as sacct has the job, set-ups and commands, and its own sentences.

Skipped where slurmctld, slurmdbd or MariaDB are not installed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.errors import ExitCode, NoOffer
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, InstanceState
from gpurun.ledger.audit import audit
from gpurun.planning.own_box import LoginHere
from gpurun.providers.slurm.jobs import SINFO, SQUEUE, sbatch_refusal
from gpurun.providers.slurm.provider import Site, SlurmProvider
from tests.contract.orders import order, wait_for
from tests.emulators.slurm import missing_books, scripted_slurm
from tests.emulators.slurm.engine import Engine, booked, running
from tests.emulators.slurm.programs import SAYS
from tests.later import LATER
from tests.lifecycle.slurm_engine_run import opened, paid, seen
from tests.lifecycle.tiny_runs import start

CLOCK = SystemClock()
pytestmark = [LATER, pytest.mark.skipif(bool(missing_books()), reason=missing_books() or "it is here")]
CLOSE_S = 3.0
"""How far a receipt may be from what accounting has."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("slurm") / "root", has_books=True) as made:
        yield made


@pytest.mark.parametrize(
    ("how", "word", "code"),
    [
        ("well", "COMPLETED", ExitCode.DONE),
        ("cancelled", "CANCELLED", ExitCode.TRAINING_FAILED),
        ("limit", "TIMEOUT", ExitCode.BUDGET_STOP),
        ("node", "NODE_FAIL", ExitCode.TRAINING_FAILED),
    ],
)
def test_a_receipt_is_within_three_seconds_of_accounting(
    engine: Engine, tmp_path: Path, how: str, word: str, code: ExitCode
) -> None:
    home = Home(tmp_path / "home")
    folder = opened(engine, home, 30 if how == "well" else 100_000)
    driven = start(home)
    if how != "well":
        seen(folder, Event.TRAIN_STARTED)
        job = engine.ask("squeue", "-h", "-o", "%i").stdout.strip()
        if how == "cancelled":
            engine.ask("scancel", job)
        elif how == "node":
            engine.break_node()
        else:  # Its time is over as far as Slurm is concerned, and not by the lease.
            engine.ask("scontrol", "update", f"jobid={job}", "timelimit=1")
    _, errors = driven.communicate(timeout=300)
    if how == "node":
        engine.mend_node()
    number, billable_s = paid(folder)
    state, elapsed_s = booked(engine, number)
    assert (state, billable_s) == (word, pytest.approx(elapsed_s, abs=CLOSE_S))
    assert driven.returncode in (code, ExitCode.TRAINING_FAILED), errors
    assert [row.problems for row in audit(home).rows] == [()]


def gpurun(home: Home, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPURUN_HOME": str(home.root)}
    return subprocess.run(
        [sys.executable, "-m", "gpurun", *words], env=environment, capture_output=True, text=True, cwd=cwd, timeout=300
    )


def at_home(engine: Engine, tmp_path: Path, *lines: str) -> Home:
    home = Home(tmp_path / "home").prepare()
    table = ["[slurm.lab]", 'host = "local"', f'workdir = "{engine.work}"', f'python = "{sys.executable}"', *lines]
    home.config.write_text("\n".join([*table, ""]))
    return home


@pytest.mark.skipif(not Path("/usr/share/modules/init").exists(), reason="apt-get install environment-modules")
def test_modules_and_a_venv_work_in_a_set_up_and_are_shown(engine: Engine, tmp_path: Path) -> None:
    venv = Path(sys.prefix) / "bin" / "activate"
    setup = f"module load null && module list && source {venv} && export PYTHONPATH=/opt/lab"
    home = at_home(engine, tmp_path, f'setup = "{setup}"')
    (lab := tmp_path / "lab").mkdir()
    (lab / "t.py").write_text("import os, sys; print(sys.executable, os.environ['PYTHONPATH'])\n")
    words = ("run", "--provider", "slurm", "--gpu", "cpu", "--accept-cpu", "--partition", "debug", "--yes")
    ran = gpurun(home, *words, "--name", "set-1", "--", "python", "t.py", cwd=lab)
    assert ran.returncode == ExitCode.DONE, ran.stderr
    assert gpurun(home, "logs", "set-1", cwd=lab).stdout.split() == [f"{sys.prefix}/bin/python", "/opt/lab"]
    assert "null" in gpurun(home, "logs", "set-1", "--setup", cwd=lab).stdout


def test_torchrun_on_two_nodes_meets_and_a_stop_reaches_both(engine: Engine, tmp_path: Path) -> None:
    home = at_home(engine, tmp_path)
    (lab := tmp_path / "lab").mkdir()
    (lab / "t.py").write_text(
        "import os, signal, time, torch, torch.distributed as dist\n"
        "stopped = []\nsignal.signal(signal.SIGTERM, lambda *_: stopped.append(1))\n"
        "dist.init_process_group('gloo')\nrank = dist.get_rank()\n"
        "for step in range(1, 1000):\n"
        "    told = torch.tensor([float(len(stopped))])\n    dist.all_reduce(told)\n"
        "    if rank == 0: print(f'step {step} of {dist.get_world_size()}', flush=True)\n"
        "    if told.item(): open(f'{rank}.txt', 'w').write(str(step)); break\n"
        "    time.sleep(0.2)\n"
    )
    words = ("--gpu", "2xcpu", "--accept-cpu", "--yes", "--name", "two-1", "--", "torchrun", "--nproc-per-node", "1")
    environment = {**os.environ, "GPURUN_HOME": str(home.root)}
    child = subprocess.Popen(
        [sys.executable, "-m", "gpurun", "run", "--provider", "slurm", *words, "t.py"], cwd=lab, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    folder = home.run("two-1")
    try:
        for _ in ticks(CLOCK, 0.5, 120):
            if folder.log.exists() and "step 3 of 2" in folder.log.read_text():
                break
        gpurun(home, "stop", "two-1", cwd=lab)
        assert child.wait(timeout=200) == ExitCode.DONE
    finally:
        child.kill()
        child.wait()
    assert sorted(path.name for path in (folder.artifacts / "outputs").iterdir()) == ["0.txt", "1.txt"]
    assert [row.problems for row in audit(home).rows] == [()]


def test_a_queue_has_reason_place_and_start_and_a_qos_its_cure(engine: Engine) -> None:
    provider = SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK)
    engine.ask("sbatch", "-N2", "--exclusive", "--time=9", "-o", "/dev/null", "--wrap", "sleep 500")
    need = GpuNeed(count=0, name="cpu", nodes=2)
    made = provider.create(order(provider).model_copy(update={"offer": provider.offers(need, ())[0]}))
    for _ in ticks(CLOCK, 1, 90):  # The backfill scheduler says it at its next turn.
        words = provider.queue_words(provider.read(made.id))
        if "start expected" in words:
            break
    assert re.fullmatch(r"(Resources|Priority) · place 1 of 1 in main · start expected .+", words)
    low = SlurmProvider([Site(replace(engine.cluster, qos="low"), LoginHere())], CLOCK)
    with pytest.raises(NoOffer, match="QOSMaxWallDurationPerJobLimit") as refused:
        low.start_of(low.offers(GpuNeed(count=0, name="cpu"), ())[0], 1800)
    assert "--hours" in refused.value.hint
    engine.ask("scancel", "-u", "root")
    assert provider.read(made.id).state is not InstanceState.RUNNING


COLUMNS = r"\d+\|{state}\|\d{{9,}}\|{used}\|{ends}\|{reason}\|gr-fox-41-\w+\|fox-41 \d+ 0"


def rows_of(provider: SlurmProvider, ask: Callable[..., str]) -> dict[InstanceState, str]:
    """What squeue has, in gpurun's columns, of one job that waits for the other of its name, and of that."""
    wish = order(provider)
    first = provider.create(wish)
    wait_for(provider, first, InstanceState.RUNNING)
    second = provider.create(wish)
    try:
        return {
            one.state: ask(
                "squeue", "-h", "--me", "-t", "all", "-o", SQUEUE, "-j", one.id.rpartition("/")[2]
            ).splitlines()[-1]
            for one in (provider.read(first.id), provider.read(second.id))
        }
    finally:
        for one in (second, first):
            provider.destroy(one.id)


def test_lists_of_the_scripted_slurm_have_the_real_ones_columns(engine: Engine, tmp_path: Path) -> None:
    def ask_in(environment: dict[str, str]) -> Callable[..., str]:
        def ask(*argv: str) -> str:
            told = subprocess.run(argv, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
            return told.stdout.strip()

        return ask

    lists = list[dict[InstanceState, str]]()
    partitions = list[str]()
    real = ask_in({"SLURM_TIME_FORMAT": "%s"})
    lists.append(rows_of(SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK), real))
    partitions.append(real("sinfo", "-h", "-o", SINFO))
    with scripted_slurm(tmp_path) as made:
        lists.append(rows_of(SlurmProvider([Site(made.cluster, LoginHere())], CLOCK), real))
        partitions.append(real("sinfo", "-h", "-o", SINFO))
    for rows in lists:
        runs, waits = rows[InstanceState.RUNNING], rows[InstanceState.PENDING]
        assert re.fullmatch(COLUMNS.format(state="RUNNING", used=r"\d+:\d\d", ends=r"\d{9,}", reason="None"), runs), (
            runs
        )
        assert re.fullmatch(COLUMNS.format(state="PENDING", used="0:00", ends="N/A", reason=r"\w+"), waits), waits
    for text in partitions:
        for line in text.splitlines():
            assert re.fullmatch(r"\w+\*?\|(up|down)\|(infinite|[\d:-]+)\|\w+\*?\|\d+\|(\(null\)|gpu:.+)", line), line


def words_of(engine: Engine, *argv: str) -> list[str]:
    return engine.ask(*argv, is_checked=False).stderr.strip().splitlines()


REFUSALS = {
    ("--account=nobody",): "Invalid account or account/partition combination specified",
    ("--qos=nothing",): "Invalid qos specification",
    ("--mem=99999999",): "Requested node configuration is not available",
}


def test_what_the_scripted_slurm_says_the_real_one_says(engine: Engine) -> None:
    done = engine.ask("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true").stdout.strip()
    booked(engine, done)
    assert words_of(engine, "squeue", "-j", "9999") == [SAYS["squeue"].format(SAYS["no_job"])]
    assert words_of(engine, "scancel", "--me", "--name=x", done) == [SAYS["not cancelled"].format(done)]
    step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--quiet")
    assert words_of(engine, *step, f"--jobid={done}", "true") == [SAYS["expired"].format(done)]
    assert words_of(engine, *step, "--jobid=9999", "true") == [SAYS["no step"].format(9999)]
    (starts,) = words_of(engine, "sbatch", "--test-only", "--wrap", "true")
    form = re.escape(SAYS["starts"]).replace(r"\{\}", r"\S+")
    assert re.fullmatch(form, starts)
    for asked, refusal in REFUSALS.items():
        assert words_of(engine, "sbatch", *asked, "--wrap", "true")[-1] == SAYS["sbatch"].format(refusal)
        tried = words_of(engine, "sbatch", "--test-only", *asked, "--wrap", "true")
        assert tried[-1] == SAYS["sbatch --test-only"].format(refusal)
        assert sbatch_refusal("\n".join(tried))[1], "each has its cure"
    config = engine.ask("scontrol", "show", "config").stdout.splitlines()
    assert config[0].startswith(SAYS["config"])
    facts = {"cluster": "probe", "tracker": "proctrack/cgroup", "over": "0 min"}
    assert {SAYS[name].format(fact) for name, fact in facts.items()} <= set(config)
    engine.controller.send_signal(signal.SIGSTOP)  # It takes the request, and answers nothing.
    try:
        assert words_of(engine, "sbatch", "--wrap", "true")[-1] == SAYS["sbatch"].format(SAYS["timed out"])
    finally:
        engine.controller.send_signal(signal.SIGCONT)
    engine.ask("scancel", "-u", "root")
    engine.controller.send_signal(signal.SIGTERM)
    engine.controller.wait()
    asked_of = {
        "squeue": ("squeue", "-h"),
        "sinfo": ("sinfo",),
        "scontrol": ("scontrol", "show", "config"),
        "sbatch": ("sbatch", "--wrap", "true"),
        "sbatch --test-only": ("sbatch", "--test-only", "--wrap", "true"),
        "scancel": ("scancel", "--me", "1"),
    }
    try:
        said = {name: words_of(engine, *argv)[-1] for name, argv in asked_of.items()}
    finally:
        engine.controller = engine.start("slurmctld", "-D", "-f", str(engine.conf))
    assert said == {name: SAYS[name].format(SAYS["away"]) for name in asked_of}
