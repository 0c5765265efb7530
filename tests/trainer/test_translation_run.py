"""Tests of translation through the ordinary command: the usual loop trains, evaluates, samples, saves and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from translation_lab import CONTEXT, lab_recipe, open_lab, written

from tests.refusals import lacking
from tests.trainer.tiny_training import Train, events, losses, run_command
from trainer import generate
from trainer import train as train_module
from trainer.checkpoint import read_checkpoint
from trainer.recipe import parse_recipe
from trainer.run import RunIO, Setup, State

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("copies") / "data", "copy", "char-pairs", context=CONTEXT)


def small(dropout: float = 0.0, **train: Any) -> dict[str, Any]:
    """Return a recipe of six steps with 16 pairs in four portions, saved after three steps."""
    keys = {"steps": 6, "batch_tokens": 16 * CONTEXT, "micro_batch": 4, "checkpoint_every": 3}
    return lab_recipe(
        "copy", "char-pairs", model={"layers": 1, "heads": 2, "width": 32, "dropout": dropout},
        schedule={"warmup_steps": 4}, train=keys | train, eval={"every": 3, "tokens": 50 * CONTEXT},
        sample={"prompts": ["abcdefgh"], "tokens": 5, "beams": 3},
    ).as_record()  # fmt: skip


def test_the_command_trains_evaluates_and_samples_the_pairs(copies: Path, tmp_path: Path, train: Train) -> None:
    recipe, out = small(), tmp_path / "out"
    assert train(recipe, out, copies) == 0
    lab = open_lab(copies, parse_recipe(recipe))
    assert list(losses(out).values()) == pytest.approx(lab.train(range(6)), rel=1e-5)
    assert {event["mfu"] for event in events(out, "step")} == {None}

    evaluation = events(out, "eval")[-1]
    assert evaluation["bits_per_byte"] is None
    held_out = [lab.task.val.target(pair) for pair in lab.task.val_samples.step_pairs(0)]
    assert (len(held_out), evaluation["eval_tokens"]) == (50, sum(map(len, held_out)))
    whole = lab.task.val.batch(lab.task.val_samples.step_pairs(0).tolist())
    lab.model.load_state_dict(read_checkpoint(out, 6).model)
    said = lab.model.eval()(whole.source, whole.target, whole.labels).item()
    assert evaluation["val_loss"] == pytest.approx(said, rel=1e-5)

    ids = lab.task.data.prompts[0].ids
    (found,) = lab.task.translate(lab.model, [ids], beams=3, alpha=0.6, most=5)
    sample = events(out, "sample")[-1]
    assert (sample["prompt"], sample["text"]) == ("abcdefgh", lab.task.text(found.ids))
    assert 0 < len(found.ids) <= 5 < len(ids)


def test_a_run_that_ended_goes_on_bit_for_bit(
    copies: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small(dropout=0.1)
    assert train(recipe, tmp_path / "straight", copies) == 0
    take = train_module.take_step

    def fail_at_5(setup: Setup, state: State, io: RunIO) -> tuple[dict[str, float], bool]:
        if state.step == 4:
            raise RuntimeError("the machine is gone")
        return take(setup, state, io)

    with monkeypatch.context() as patched:
        patched.setattr(train_module, "take_step", fail_at_5)
        assert train(recipe, tmp_path / "ended", copies) == 1
    assert train(recipe, tmp_path / "ended", copies) == 0
    assert events(tmp_path / "ended", "start")[-1]["resumed_from"] == 3
    assert losses(tmp_path / "ended") == losses(tmp_path / "straight")
    straight, ended = (read_checkpoint(tmp_path / name, 6).model for name in ("straight", "ended"))
    assert all((straight[name] == ended[name]).all() for name in straight)


def test_text_that_is_no_pairs_is_refused(data: Path, tmp_path: Path, train: Train) -> None:
    recipe = small()
    assert train(recipe, tmp_path / "out", data) == 2
    assert "char-pairs" in events(tmp_path / "out", "stop")[-1]["message"]


@pytest.mark.slow
def test_two_processes_with_a_part_each_train_what_one_trains(copies: Path, tmp_path: Path, train: Train) -> None:
    recipe = small(parallel="fsdp")
    assert train(recipe, tmp_path / "one", copies) == 0
    done = run_command(recipe, copies, tmp_path / "two", processes=2)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    texts = [[event["text"] for event in events(tmp_path / out, "sample")] for out in ("one", "two")]
    assert texts[0] == texts[1]


def test_a_checkpoint_translates_a_sentence_of_the_users(
    copies: Path, tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = small(), tmp_path / "out"
    assert train(recipe, out, copies) == 0
    capsys.readouterr()

    def ask(prompt: str, *options: str) -> tuple[int, Any]:
        code = generate.main([str(out), "--data", str(copies), f"--prompt={prompt}", *options])
        said = capsys.readouterr()
        return code, json.loads(said.out) if code == 0 else said.err.strip()

    code, reply = ask("abcdefgh")
    assert code == 0
    assert reply["text"] == events(out, "sample")[-1]["text"], "as at the checkpoint: the same search, the same setting"
    assert (reply["step"], reply["beams"], reply["tokens"] <= 5) == (6, 3, True)
    assert ask("abcdefgh", "--beams=1", "--tokens=9")[1]["tokens"] <= 9
    assert lacking(ask("ab7")[1], "refused: ", '"7" (U+0037)') == []
    assert ask("abc", "--temperature=0")[1].startswith("refused: --temperature ")
    assert lacking(ask("a" * 23)[1], "refused: ", "25 positions", "24") == []
    assert ask("abc", "--beams=0")[0] == 2
    assert lacking(ask(" ")[1], "refused: ", "empty") == []


def test_words_that_the_vocabulary_does_not_know_are_named(
    tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "data", "english-german", "word-pairs", context=CONTEXT, limit_bytes=40_000)
    keys = {"steps": 2, "batch_tokens": 4 * CONTEXT, "micro_batch": 4, "checkpoint_every": 2}
    recipe = lab_recipe("english-german", "word-pairs", train=keys, schedule={"warmup_steps": 1}).as_record()
    assert train(recipe, tmp_path / "out", folder) == 0
    capsys.readouterr()
    options = ["--data", str(folder), "--prompt=the old wombat sees a Bandersnatch."]
    assert generate.main([str(tmp_path / "out"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["unknown"] == ["wombat", "Bandersnatch"]
