"""Tests of a job whose command runs in an image while its pilot and agent do not: with a fake and a real apptainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.core.clock import ticks
from gpurun.core.command import Command
from gpurun.core.errors import ExitCode, SetupError, UsageError
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Choices, Plan, Request
from gpurun.core.stop_request import ask_to_stop
from gpurun.jobs import command
from gpurun.ledger.audit import audit
from gpurun.ledger.runs import create_run
from tests.changed_plan import changed_plan
from tests.emulators.apptainer import Images, real_apptainer, real_images, stand_in
from tests.emulators.slurm import ScriptedSlurm
from tests.later import LATER
from tests.lifecycle.drive import tiny_python
from tests.lifecycle.slurm_run import (
    CLOCK,
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
from tests.plan_makers import make_command_plan
from tests.refusals import lacking, refusal

__all__ = ["home", "slurm"]
HERE = Path(__file__).parents[1] / "emulators" / "apptainer"
NO_ENGINE = f"apptainer is not installed here: apt-get install apptainer, or sh {HERE.name}/install.sh"
REAL = pytest.param("real", marks=[LATER, pytest.mark.skipif(real_apptainer() is None, reason=NO_ENGINE)])
PROGRAM = """
import os, sys
print("in", os.path.basename(os.environ.get("APPTAINER_CONTAINER", "nothing")), os.environ["FOO"])
open("made.txt", "w").write(sys.argv[1])
open(os.environ["GPURUN_EVENTS"], "a").write('{"step": 7}\\n')
"""


@pytest.fixture(params=["stand-in", REAL])
def images(
    request: pytest.FixtureRequest, home: Home, slurm: ScriptedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Images:
    monkeypatch.setattr(command, "LOOK_S", 1.0)
    python = tiny_python(home.root)
    made = (stand_in if request.param == "stand-in" else real_images)(tmp_path / "images", python)
    home.config.write_text(f'{home.config.read_text().replace(str(python), sys.executable)}setup = "{made.setup}"\n')
    return made


def plan_of(
    home: Home, tmp_path: Path, *argv: str, image: Path | str, nodes: int = 1, program: str = PROGRAM, **more: object
) -> RunFolder:
    lab = tmp_path / "lab"
    lab.mkdir(exist_ok=True)
    (lab / "t.py").write_text(program)
    job_command = Command(argv=argv, folder=str(lab), outputs=("*.txt",), env={"FOO": "bar"}).model_copy(update=more)
    choices, need = Choices(accept_cpu=True, image=str(image)), GpuNeed(count=0, name="cpu", nodes=nodes)
    request = Request(recipe="", providers=("slurm",), gpu=need, command=job_command, choices=choices)
    return create_run(home, request, make_command_plan(request, run="fox-41", home=home, clock=CLOCK, say=print))


@pytest.mark.parametrize("argv", [("t.py", "x"), ("sh", "-c", "python3 t.py x")])
def test_a_command_runs_in_the_image_and_its_outputs_come_home(
    home: Home, slurm: ScriptedSlurm, images: Images, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    folder = plan_of(home, tmp_path, *argv, image=images.good)
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    assert "in image.sif bar" in folder.log.read_text()
    assert (folder.artifacts / "outputs" / "made.txt").read_text() == "x"
    assert '"step": 7' in folder.events.read_text()
    assert [row.problems for row in audit(home).rows] == [()]


def test_a_person_gets_into_the_image_in_which_the_job_runs(
    home: Home, slurm: ScriptedSlurm, images: Images, tmp_path: Path
) -> None:
    folder = plan_of(home, tmp_path, "sh", "-c", "sleep 600", image=images.good)
    child = begin(home)
    try:
        for _ in ticks(CLOCK, 0.05, 30):
            if Event.TRAIN_STARTED in events_of(folder):
                break
        words = ["ssh", "--home", str(home.root), "fox-41", "--", "sh", "-c", 'echo "$APPTAINER_CONTAINER"']
        said = subprocess.run(  # In a separate process, which srun replaces.
            [sys.executable, "-m", "gpurun", *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        assert (said.stdout.strip(), said.returncode) == (str(images.good), 0), said.stderr
    finally:
        ask_to_stop(folder, "destroy", by="user", reason="seen")
        ended(child, home)


def test_the_trainer_runs_in_the_image_on_two_nodes(home: Home, slurm: ScriptedSlurm, images: Images) -> None:
    home.config.write_text(f'{home.config.read_text()}container = "{images.good}"\n')
    folder = opened(home, slurm, nodes=2)
    plan = Plan.from_json(folder.plan.read_bytes())
    choices = plan.choices.model_copy(update={"image": str(images.good)})
    folder.plan.write_text(changed_plan(plan, {"choices": choices}).to_json())
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    check_promises(home, folder, slurm)
    if images.calls:
        words = images.calls.read_text()
        assert words.count("torch.distributed.run --nproc-per-node=1 -m trainer.train") == 2
        assert f"--silent exec --nv --bind {slurm.work}/" in words


def test_every_node_runs_the_command_in_the_image(
    home: Home, slurm: ScriptedSlurm, images: Images, tmp_path: Path
) -> None:
    words = ("sh", "-c", 'echo "$APPTAINER_CONTAINER" >$NODE_RANK.txt')
    folder = plan_of(home, tmp_path, *words, image=images.good, nodes=2)
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    written = {path.name: path.read_text().strip() for path in (folder.artifacts / "outputs").iterdir()}
    assert written == {"0.txt": str(images.good), "1.txt": str(images.good)}


def test_an_image_that_lacks_something_is_refused_early(
    home: Home, slurm: ScriptedSlurm, images: Images, tmp_path: Path
) -> None:
    absent = slurm.work.parent / "images" / "no-such.sif"
    with refusal(SetupError, "slurm.image", str(absent)):
        plan_of(home, tmp_path, "t.py", "x", image=absent)
    with refusal(SetupError, "slurm.image", str(images.good), "no_such_module"):
        plan_of(home, tmp_path, "t.py", "x", image=images.good, program=f"import no_such_module\n{PROGRAM}")
    with refusal(UsageError, "pip.image", "--pip"):
        plan_of(home, tmp_path, "t.py", "x", image=images.good, pip=("numpy",))
    config = home.config.read_text()
    home.config.write_text(config.replace(images.setup, images.bare_setup))
    folder = plan_of(home, tmp_path, "t.py", "x", image=images.bare)
    (warning,) = [words for words in Plan.from_json(folder.plan.read_bytes()).warnings if "bare.sif" in words]
    assert lacking(warning, str(images.bare), "python3") == []
    assert drive(home) == ExitCode.TRAINING_FAILED
    assert "python3" in folder.log.read_text()


def test_a_node_without_apptainer_is_a_warning_and_ends_the_job(
    home: Home, slurm: ScriptedSlurm, images: Images, tmp_path: Path
) -> None:
    home.config.write_text(home.config.read_text().replace(images.setup, "export PATH=/usr/bin:/bin"))
    folder = plan_of(home, tmp_path, "t.py", "x", image=images.good)
    warnings = Plan.from_json(folder.plan.read_bytes()).warnings
    assert any(lacking(warning, "apptainer", "singularity", "login node") == [] for warning in warnings)
    assert drive(home) == ExitCode.SETUP
    failure = failure_of(folder)
    assert failure["code"] == "image.failed"
    assert lacking(failure["message"], "apptainer", "singularity", "PATH") == []
    assert "apptainer" in folder.table_setup_log.read_text()
    assert [row.problems for row in audit(home).rows] == [()]


def test_an_address_is_fetched_once_by_the_job(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    made = stand_in(tmp_path / "images", tiny_python(home.root))
    table = home.config.read_text()
    home.config.write_text(f'{table}setup = "{made.setup}"\n')
    folder = plan_of(home, tmp_path, "t.py", "x", image="docker://example.org/lab:1")
    plan = Plan.from_json(folder.plan.read_bytes())
    assert plan.offer.boot_s >= 900
    assert any("docker://example.org/lab:1" in warning for warning in plan.warnings)
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    assert made.calls is not None
    assert [line for line in made.calls.read_text().splitlines() if "docker://" in line] == [
        "pull image.sif docker://example.org/lab:1"
    ]
    home.config.write_text(f'{table}setup = "{made.setup} APPTAINER_REGISTRY=/nowhere"\n')
    (other := Home(tmp_path / "other")).prepare()
    other.config.write_text(home.config.read_text())
    lost = plan_of(other, tmp_path, "t.py", "x", image="docker://example.org/lab:1")
    assert drive(other) == ExitCode.SETUP, failure_of(lost)
    assert "no such host" in failure_of(lost)["message"]
