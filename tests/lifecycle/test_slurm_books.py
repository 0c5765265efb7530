"""Tests on the real Slurm with accounting: receipts that match sacct, setup scripts, commands and Slurm's messages.

Skipped where slurmctld, slurmdbd or MariaDB are not installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
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
from gpurun.providers.slurm.provider import Site, SlurmProvider
from tests.contract.orders import order, wait_for
from tests.emulators.conda import conda_base, make_environment
from tests.emulators.slurm import missing_books
from tests.emulators.slurm.engine import Engine, booked, running
from tests.later import LATER
from tests.lifecycle.slurm_engine_run import opened, paid, seen
from tests.lifecycle.tiny_runs import start

CLOCK = SystemClock()
pytestmark = [LATER, pytest.mark.skipif(bool(missing_books()), reason=missing_books() or "it is here")]
CLOSE_S = 3.0
"""The most seconds by which a receipt may differ from accounting."""
RUN = ("run", "--provider", "slurm", "--gpu", "cpu", "--accept-cpu", "--partition", "debug", "--yes")


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
        else:  # Slurm's time limit ends the job, not the lease.
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


def at_home(engine: Engine, tmp_path: Path, *lines: str, python: str = sys.executable) -> Home:
    home = Home(tmp_path / "home").prepare()
    table = ["[slurm.lab]", 'host = "local"', f'workdir = "{engine.work}"', f'python = "{python}"', *lines]
    home.config.write_text("\n".join([*table, ""]))
    return home


@pytest.mark.skipif(not Path("/usr/share/modules/init").exists(), reason="apt-get install environment-modules")
def test_modules_and_a_venv_work_in_a_set_up_and_are_shown(engine: Engine, tmp_path: Path) -> None:
    venv = Path(sys.prefix) / "bin" / "activate"
    setup = f"module load null && module list && source {venv} && export PYTHONPATH=/opt/lab"
    home = at_home(engine, tmp_path, f'setup = "{setup}"')
    (lab := tmp_path / "lab").mkdir()
    (lab / "t.py").write_text("import os, sys; print(sys.executable, os.environ['PYTHONPATH'])\n")
    ran = gpurun(home, *RUN, "--name", "set-1", "--", "python", "t.py", cwd=lab)
    assert ran.returncode == ExitCode.DONE, ran.stderr
    assert gpurun(home, "logs", "set-1", cwd=lab).stdout.split() == [f"{sys.prefix}/bin/python", "/opt/lab"]
    assert "null" in gpurun(home, "logs", "set-1", "--setup", cwd=lab).stdout


def test_conda_activate_works_in_a_set_up_and_is_shown(engine: Engine, tmp_path: Path) -> None:
    source, lab = f"source {conda_base(tmp_path)}/etc/profile.d/conda.sh", make_environment(tmp_path / "lab-env")
    home = at_home(engine, tmp_path, f'setup = "{source} && conda activate {lab}"', python="python")
    (folder := tmp_path / "lab").mkdir()
    (folder / "t.py").write_text("import os, shutil; print(shutil.which('python'), os.environ['CUDA_HOME'])\n")
    ran = gpurun(home, *RUN, "--name", "conda-1", "--", "python", "t.py", cwd=folder)
    assert ran.returncode == ExitCode.DONE, ran.stderr
    assert gpurun(home, "logs", "conda-1", cwd=folder).stdout.split() == [f"{lab}/bin/python", "/opt/lab"]
    assert gpurun(home, "logs", "conda-1", "--setup", cwd=folder).stdout == f"{lab} is active\n"
    assert [row.problems for row in audit(home).rows] == [()]
    absent = replace(engine.cluster, setup=f"{source} && conda activate no-such")
    provider = SlurmProvider([Site(absent, LoginHere())], CLOCK)
    ended = wait_for(provider, provider.create(order(provider)), InstanceState.GONE)
    words = "EnvironmentNameNotFound: Could not find conda environment: no-such"
    assert words in str(provider.never_runs(ended))
    assert words in provider.setup_log(ended).decode()


def test_torchrun_on_two_nodes_meets_and_a_stop_reaches_both(engine: Engine, tmp_path: Path) -> None:
    home = at_home(engine, tmp_path)
    (lab := tmp_path / "lab").mkdir()
    (lab / "t.py").write_text(
        "import os, signal, time, torch, torch.distributed as dist\n"
        "stopped = []\nsignal.signal(signal.SIGTERM, lambda *_: stopped.append(1))\n"
        "dist.init_process_group('gloo')\nrank = dist.get_rank()\n"
        "for step in range(1, 1000):\n"
        "    stops = torch.tensor([float(len(stopped))])\n    dist.all_reduce(stops)\n"
        "    if rank == 0: print(f'step {step} of {dist.get_world_size()}', flush=True)\n"
        "    if stops.item(): open(f'{rank}.txt', 'w').write(str(step)); break\n"
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
    for _ in ticks(CLOCK, 1, 90):  # The backfill scheduler sets the expected start at its next turn.
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
