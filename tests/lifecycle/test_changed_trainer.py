"""Tests of a user's changed trainer: when gpurun refuses it, and that a run trains and continues with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpurun import __version__
from gpurun.cli.recipe_checks import own_home, rehearse_request
from gpurun.cli.session import Session
from gpurun.core.command import Command
from gpurun.core.errors import ExitCode, TrainingFailed
from gpurun.core.installed_files import bundle_root
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices, Earlier, Plan, Request
from gpurun.jobs.command import CommandJob
from gpurun.jobs.trainer import CHANGED, digest_of_trainer
from gpurun.jobs.training.changed_trainer import other_than_before
from gpurun.ledger.runs import create_run
from tests.changed_plan import as_shipped, changed_plan
from tests.command_line import gpurun
from tests.lifecycle.scripted_cloud import World
from tests.unit.report_samples import plan_of

QUICK = ("--provider", "local", "--yes", "--json")
SMALL = ("--set", "train.checkpoint_every=100", "--set", "eval.every=100", "--set", "eval.tokens=256")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of gpurun's own trainer."""
    copied = shutil.copytree(bundle_root() / "trainer", tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    return Path(copied)


def predicate_of(home: Path, run: str) -> dict[str, Any]:
    envelope = json.loads(gpurun("receipt", run, "--json").stdout.splitlines()[-1])
    predicate: dict[str, Any] = envelope["data"]["statement"]["predicate"]
    return predicate


def test_a_trainer_changed_in_one_line_trains_and_is_named(own_home: Path, copy: Path) -> None:
    loop = copy / "train.py"
    loop.write_text(loop.read_text().replace('"lr": lr, "grad_norm"', '"lr": 0.125, "grad_norm"'))
    begun = gpurun("train", "mini-gpt", *QUICK, *SMALL, "--set", "steps=2", "--trainer", str(copy), "--name", "fox-1")
    assert begun.returncode == 0, begun.stderr
    assert "lr 1.25e-01" in (own_home / "runs/fox-1/run.log").read_text()
    first = predicate_of(own_home, "fox-1")
    assert first["asked"]["trainer"] == "changed trainer"

    shutil.rmtree(copy)
    further = gpurun("train", "--from", "fox-1", "--set", "steps=3", *QUICK, "--name", "fox-2")
    assert further.returncode == 0, further.stderr
    second = predicate_of(own_home, "fox-2")
    assert second["digests"]["trainer"] == first["digests"]["trainer"]
    assert "lr 1.25e-01" in (own_home / "runs/fox-2/run.log").read_text()
    assert second["training"]["figures"]["last_step"] == 3
    audited = gpurun("audit")
    assert audited.returncode == 0
    assert f"fox-2: changed trainer, sha256 {first['digests']['trainer']}" in audited.stdout


def test_an_unchanged_copy_is_the_official_trainer(own_home: Path, copy: Path) -> None:
    def planned() -> tuple[str, bool]:
        done = gpurun("plan", "mini-gpt", "--provider", "local", "--trainer", str(copy), "--json")
        data = json.loads(done.stdout.splitlines()[-1])["data"]
        return data["trainer"], any(f"sha256 {digest_of_trainer(copy)[:4]}" in note for note in data["notes"])

    assert planned() == (f"official trainer {__version__}", False)
    (copy / "train.py").write_text((copy / "train.py").read_text() + "# mine\n")
    assert planned() == ("changed trainer", True)


def test_continuing_with_another_trainer_is_warned_about(own: Home) -> None:
    def plan(name: str, trainer: str, digest: str) -> Plan:
        earlier = Earlier(run="fox-1", step=60, bytes=1, receipt_sha256="0" * 64) if name != "fox-1" else None
        return changed_plan(plan_of(name), {"trainer": trainer, "bundle_sha256": digest, "continues": earlier})

    before = plan("fox-1", CHANGED, "a" * 64)
    create_run(own, Request(recipe="tiny"), before)
    assert list(other_than_before(plan("fox-2", CHANGED, "a" * 64), own)) == []
    for further in (plan("fox-2", CHANGED, "b" * 64), plan("fox-2", "official trainer 1.0", "b" * 64)):
        (words,) = other_than_before(further, own)
        assert words.startswith("fox-1 used another trainer: changed trainer, aaaa")


@pytest.fixture(params=["trainer", "folder"])
def program(own: Home, request: pytest.FixtureRequest) -> tuple[World, str]:
    """Return a run of a recipe or of a command, and the error code for a trainer or folder that has changed."""
    world, kind = World(own), str(request.param)
    if kind == "folder":
        job = CommandJob(recipe="train.py", recipe_sha256="0" * 64, command=Command(argv=("train.py",)))
        data = world.plan.data.model_copy(update={"folder": "", "beside": str(own.root / "own")})
        (own.root / "own" / "work").mkdir(parents=True)
        world.plan = as_shipped(world.plan.model_copy(update={"job": job, "data": data}))
        world.folder.plan.write_text(world.plan.to_json())
    return world, f"{kind}.altered"


def test_a_changed_program_rents_no_machine(program: tuple[World, str]) -> None:
    """If the program has changed since the plan, the receipt would name a program that never ran: nothing is rented."""
    world, code = program
    world.folder.plan.write_text(changed_plan(world.plan, {"bundle_sha256": "0" * 64}).to_json())
    assert world.drive() is ExitCode.SETUP
    assert world.state.failure is not None
    assert world.state.failure.code == code
    assert not world.all_of(Event.CREATE_INTENDED)
    assert not world.all_of(Event.SHIP_INTENDED)


def test_a_program_changed_during_the_boot_is_not_uploaded(
    program: tuple[World, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, code = program
    install = world.far.install_agent

    def change() -> None:
        install()
        monkeypatch.setattr(type(world.plan.job), "digest", lambda *_: "f" * 64)

    world.far.install_agent = change  # type: ignore[method-assign]
    assert world.drive() is ExitCode.SETUP
    assert world.state.failure is not None
    assert world.state.failure.code == code
    assert world.all_of(Event.CREATE_OBSERVED)
    assert not world.all_of(Event.SHIP_INTENDED)
    assert not world.cloud.alive


def _absent(copy: Path) -> None:
    shutil.rmtree(copy)


def _no_train(copy: Path) -> None:
    (copy / "train.py").unlink()


def _secret(copy: Path) -> None:
    (copy / "model.py").write_text('TOKEN = "hf_' + "a" * 34 + '"\n')


def _key_file(copy: Path) -> None:
    (copy / "id_ed25519").write_text("")


def _latin_1(copy: Path) -> None:
    (copy / "model.py").write_bytes(b"# caf\xe9\n")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (_absent, "trainer.absent"),
        (_no_train, "trainer.no_train"),
        (_secret, "pack.secret"),
        (_key_file, "pack.secret"),
        (_latin_1, "trainer.not_text"),
    ],
)
def test_a_folder_with_no_trainer_or_with_a_secret_is_refused(
    own_home: Path, copy: Path, spoil: Any, code: str
) -> None:
    spoil(copy)
    refused = gpurun("plan", "mini-gpt", "--provider", "local", "--trainer", str(copy), "--json")
    (error,) = json.loads(refused.stdout.splitlines()[-1])["errors"]
    assert (refused.returncode, error["code"]) == (2, code)
    assert str(copy) in error["message"]
    assert not [*(own_home / "cache" / "staged").glob("*")], "nothing is left of it"


RECIPE = """
about = "a test"
model = { layers = 1, heads = 1, width = 32, context = 32 }
data = { source = "stdlib", tokenizer = "char", limit_mb = 1 }
optim = { lr = 0.003 }
schedule = { kind = "cosine", warmup_steps = 5 }
train = { steps = 8, batch_tokens = 512, micro_batch = 16, checkpoint_every = 4, log_every = 1 }
eval = { every = 8, tokens = 512 }
sample = { prompts = ["def "], tokens = 8 }
hardware = { gpu = "1xA100", disk_gb = 20, on_cpu = "rehearsal" }
"""


@pytest.mark.slow
def test_an_optimiser_that_cannot_be_resumed_fails_its_rehearsal(own: Home, copy: Path, tmp_path: Path) -> None:
    """The optimizer saves only half of its state: the rehearsal must find that the run could not be continued."""
    path, session = tmp_path / "small.toml", Session(home=own, quiet=True)
    path.write_text(RECIPE)
    request = Request(recipe=str(path), choices=Choices(trainer=str(copy)))
    plan, _ = rehearse_request(session, request, own, str(copy))
    assert plan.continues is not None
    assert plan.continues.step == 7, "half of the steps were fewer than its warm-up has"

    optim = copy / "optim.py"
    loop = "for key, value in optimizer.state[parameter].items()\n    }"
    optim.write_text(optim.read_text().replace(loop, loop.replace("\n", '\n        if key != "exp_avg"\n')))
    with own_home(own) as home, pytest.raises(TrainingFailed) as failed:
        rehearse_request(session, request, home, str(copy))
    assert "after step 7 " in str(failed.value)
    assert "exp_avg" in str(failed.value)
    assert "optimizer_tensors" in failed.value.hint
