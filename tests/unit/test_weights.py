"""Tests of `gpurun sample` and `gpurun export`: the trainer gets only a checkpoint that is at home."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpurun.cli.app import build_app
from gpurun.cli.commands.export import export
from gpurun.cli.commands.sample import sample
from gpurun.cli.session import Session
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import SetupError, UsageError, VerificationFailed
from gpurun.core.paths import Home, RunFolder
from gpurun.lifecycle.artifacts.on_demand import bring_now
from gpurun.readers import weights
from tests.lifecycle.early import FREE, Instance
from tests.refusals import refusal
from tests.unit.ledger_samples import WEIGHTS
from tests.unit.report_samples import finished_run, opened_run

# A trainer of a few lines that prints its arguments, the names in its environment and its folder.
STUB = """
import json, os, sys
words = sys.argv[1:]
prompt = next(word for word in words if word.startswith("--prompt=")).removeprefix("--prompt=")
if prompt == "refuse":
    sys.exit(print("refused: the character \\u202e is not in the vocabulary", file=sys.stderr) or 2)
if prompt == "break":
    bytearray(1 << 40)
if prompt == "hang":
    import time; time.sleep(600)
if prompt == "ein Hund":
    sys.exit(print(json.dumps({"prompt": prompt, "text": "a dog", "beams": 4, "unknown": []})))
answer = {"prompt": prompt, "text": "\\x1b]0;evil\\x07 and more\\nlines", "argv": words}
print(json.dumps(answer | {"environment": sorted(os.environ), "cwd": os.getcwd()}))
"""
EXPORT_STUB = """
import pathlib, shutil, sys
weights, folder, _, data, _, figures, *recipe = sys.argv[1:]
pathlib.Path(folder).mkdir()
shutil.copy(figures, folder + "/figures.json")
print(folder + "/figures.json")
"""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return a session whose bundle has stubs instead of the trainer, on a machine that seems to have torch."""
    bundle = tmp_path / "bundle"
    (bundle / "trainer").mkdir(parents=True)
    (bundle / "trainer" / "__init__.py").write_text("")
    (bundle / "trainer" / "generate.py").write_text(STUB)
    (bundle / "trainer" / "export.py").write_text(EXPORT_STUB)
    monkeypatch.setattr("gpurun.core.bounded_program.bundle_root", lambda: bundle)
    monkeypatch.setattr(weights, "find_spec", lambda name: object())
    return Session(home=Home(tmp_path / "home").prepare(), quiet=True)


@pytest.fixture
def folder(session: Session) -> RunFolder:
    return finished_run(session.home, "fox-41")


def test_the_trainer_gets_no_key_and_its_words_steer_no_terminal(
    session: Session, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "secret")
    result = sample(
        session, run="fox", prompt="--help", checkpoint="best", tokens=7, temperature=0.0, top_k=None, seed=1
    )
    argv = result.data["argv"]
    words = ["--tokens=7", "--temperature=0.0", "--seed=1", "--prompt=--help"]
    assert argv[:7] == [str(folder.artifacts / WEIGHTS), *words, "--data", "/nowhere"]
    assert "RUNPOD_API_KEY" not in result.data["environment"]
    assert Path(result.data["cwd"]).name == "bundle", "a trainer in the person's folder is not run"
    assert result.text == "--help and more\nlines"


def test_a_translation_stands_below_its_source(session: Session, folder: RunFolder) -> None:
    assert sample(session, run="fox", prompt="ein Hund", checkpoint="best", beams=4).text == "ein Hund\na dog"


@pytest.mark.parametrize("name", ["last", "best", "120", "000120", WEIGHTS])
def test_a_checkpoint_has_several_names(session: Session, folder: RunFolder, name: str) -> None:
    assert sample(session, run="fox-41", prompt="a", checkpoint=name).data["prompt"] == "a"


def test_a_checkpoint_other_than_the_one_at_home_is_never_opened(session: Session, folder: RunFolder) -> None:
    path = folder.artifacts / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with refusal(VerificationFailed, "checkpoint.tampered"):
        sample(session, run="fox-41", prompt="a", checkpoint="best")
    path.unlink()
    with refusal(VerificationFailed, "checkpoint.missing", "No such file"):
        sample(session, run="fox-41", prompt="a", checkpoint="best")


def test_what_collect_brought_in_mid_run_is_used_and_no_other(session: Session, tmp_path: Path) -> None:
    instance, going = Instance(tmp_path / "instance"), opened_run(session.home, "owl-07").folder
    instance.save(10, 20, best=10)
    with refusal(UsageError, "checkpoint.none", "owl-07") as early:
        sample(session, run="owl-07", prompt="a", checkpoint="last")
    assert "gpurun collect owl-07" in early.value.hint
    bring_now(instance.far, going, "best", VirtualClock(), lambda file, have_bytes: None, FREE)
    for name in ("best", "last", "10"):
        argv = sample(session, run="owl-07", prompt="a", checkpoint=name).data["argv"]
        assert argv[0] == str(going.artifacts / "checkpoints/000010.weights")
    with refusal(UsageError, "checkpoint.unknown", "'20'"):
        sample(session, run="owl-07", prompt="a", checkpoint="20")
    made = export(session, "owl-07", tmp_path / "hf", to="hf", checkpoint="best")
    assert made.data["figures"]["receipt sha256"] is None
    brought = going.artifacts / "checkpoints/000010.state"
    brought.write_bytes(b"S" + brought.read_bytes()[1:])
    with refusal(VerificationFailed, "checkpoint.tampered"):
        sample(session, run="owl-07", prompt="a", checkpoint="best")


def test_what_cannot_be_done_is_told(session: Session, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with refusal(UsageError, "checkpoint.unknown", "'7'") as unknown:
        sample(session, run="fox-41", prompt="a", checkpoint="7")
    assert "000120" in unknown.value.hint
    with refusal(UsageError, "trainer.refused", "The character  is"):
        sample(session, run="fox-41", prompt="refuse", checkpoint="best")
    with pytest.raises(SetupError, match="MemoryError"):
        sample(session, run="fox-41", prompt="break", checkpoint="best")
    monkeypatch.setattr("gpurun.cli.commands.sample.START_S", 1)
    monkeypatch.setattr("gpurun.cli.commands.sample.TOKEN_S", 0)
    with refusal(SetupError, "trainer.too_long"):
        sample(session, run="fox-41", prompt="hang", checkpoint="best")
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="PyTorch") as missing:
        sample(session, run="fox-41", prompt="a", checkpoint="best")
    assert "[local]" in missing.value.hint


@pytest.mark.parametrize(
    ("setting", "facts"),
    [
        ({"tokens": 0}, ("--tokens 0 ", "100,000")),
        ({"seed": 1 << 64}, ("--seed 18446744073709551616 ",)),
        ({"temperature": -0.1}, ("--temperature -0.1 ", "1,000")),
        ({"temperature": float("nan")}, ("--temperature nan ", "1,000")),
        ({"top_k": -1}, ("--top-k -1 ",)),
        ({"top_p": 1.5}, ("--top-p 1.5 ", "0.0001")),
        ({"beams": 1_000_000}, ("--beams 1000000 ", "1,000")),
    ],
)
def test_a_setting_no_sampler_takes_is_refused_before_torch(
    session: Session,
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    setting: dict[str, float],
    facts: tuple[str, ...],
) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with refusal(UsageError, f"usage.{next(iter(setting))}", *facts):
        sample(session, run="fox-41", prompt="a", checkpoint="best", **setting)


def test_an_export_carries_the_receipts_figures(session: Session, folder: RunFolder, tmp_path: Path) -> None:
    result = export(session, "fox-41", tmp_path / "hf", to="hf", checkpoint="best")
    card = json.loads((tmp_path / "hf" / "figures.json").read_text())
    assert result.text == str(tmp_path / "hf" / "figures.json")
    assert (card["GPU"], card["final training loss"], card["best validation loss"]) == ("NVIDIA H100", 2.0, 2.1)
    receipt = session.home.ledger.read_text()
    assert card["receipt sha256"].split()[0] in receipt
    assert card["cost of the whole rental"].startswith("$2.")
    assert "continued from" not in card, "it went on from nothing, which is not unknown"
    with pytest.raises(UsageError, match="'onnx'"):
        export(session, "fox-41", tmp_path / "x", to="onnx", checkpoint="best")


def test_a_card_calls_no_cpu_a_gpu(session: Session, folder: RunFolder, tmp_path: Path) -> None:
    folder.events.write_text(folder.events.read_text().replace('"cuda"', '"cpu"').replace('"NVIDIA H100"', "null"))
    card = export(session, "fox-41", tmp_path / "hf", to="hf", checkpoint="best").data["figures"]
    assert (card.get("GPU"), card["device"]) == (None, "cpu")


def test_the_command_line_passes_on_what_was_typed_and_no_more(
    session: Session, folder: RunFolder, tmp_path: Path
) -> None:
    home = ["--home", str(session.home.root), "--json"]
    words = ["sample", "fox-41", "--prompt", "a b", "--top-k", "5", "--checkpoint", "last", *home]
    answer = json.loads(CliRunner().invoke(build_app(), words, standalone_mode=False).stdout)
    assert answer["data"]["argv"][1:3] == ["--top-k=5", "--prompt=a b"]
    made = CliRunner().invoke(build_app(), ["export", "fox-41", str(tmp_path / "hf"), *home], standalone_mode=False)
    assert json.loads(made.stdout)["data"]["step"] == 120


def test_one_argument_of_export_is_the_folder_for_the_usual_run(
    session: Session, folder: RunFolder, tmp_path: Path
) -> None:
    made = export(session, str(tmp_path / "hf")).data
    assert (made["run"], made["folder"]) == ("fox-41", str(tmp_path / "hf"))
    for run in ("fox-41", "@last"):
        with refusal(UsageError, "export.no_folder"):
            export(session, run)
    with refusal(UsageError, "run.blank"):
        export(session, " ")


def test_in_a_home_that_was_moved_the_runs_own_data_is_found(session: Session, folder: RunFolder) -> None:
    """After a move of the home, the plan still names the data's old folder.

    gpurun must find the data in the run's folder.
    """
    plan, old = json.loads(folder.plan.read_text()), "/gone/gpurun/runs/fox-41/data"
    folder.plan.write_text(json.dumps(plan | {"data": plan["data"] | {"folder": old}}))
    argv = sample(session, run="fox-41", prompt="a", checkpoint="best").data["argv"]
    assert argv[3] == old, "where they are nowhere, it is told where they were"
    folder.data.mkdir()
    argv = sample(session, run="fox-41", prompt="a", checkpoint="best").data["argv"]
    assert argv[3] == str(folder.data)
