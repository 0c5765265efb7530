"""Tests of the command that generates text from a checkpoint on the user's computer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.refusals import lacking
from tests.trainer import generate
from tests.trainer.generate import TOKENS, write_state
from tests.trainer.tiny_training import MODEL
from trainer.checkpoint import write_tensors
from trainer.errors import Refused
from trainer.generate import encode, main, open_checkpoint
from trainer.model import GPT
from trainer.recipe import ModelConfig
from trainer.shards import Tokenizer
from trainer.tokenizer import sha256_of_tokens

weights = generate.weights


def ask(weights: Path, capsys: pytest.CaptureFixture[str], *options: str, place: Path | None = None) -> tuple[int, str]:
    """Run the command; return its exit code and its stdout, or its stderr if stdout is empty.

    `place` replaces the path of the weights on the command line.
    """
    code = main([str(place or weights), "--data", str(weights.parents[2] / "data"), *options])
    said = capsys.readouterr()
    return code, said.out or said.err


def test_the_same_seed_gives_the_same_text_and_another_another(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again, other = (
        json.loads(ask(weights, capsys, "--prompt", "abc", "--tokens=40", f"--seed={seed}")[1]) for seed in (1, 1, 2)
    )
    assert first == again
    assert first["text"] != other["text"]
    assert (first["step"], first["tokens"], first["prompt"]) == (7, 40, "abc")
    assert set(first["text"]) <= set("\nabcdefé\ufffd"), "the vocabulary's padding is never drawn"


def test_a_stop_ends_the_text_only_in_what_is_written(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(ask(weights, capsys, "--prompt", "abc", "--tokens=60", "--seed=1")[1])["text"]
    stop = whole[20:22]
    reply = json.loads(ask(weights, capsys, "--prompt", f"abc{stop}", "--tokens=60", "--seed=1", f"--stop={stop}")[1])
    assert stop not in reply["text"]
    assert reply["text"], "a stop in the prompt ends nothing"
    reply = json.loads(ask(weights, capsys, "--prompt", "abc", "--tokens=60", "--seed=1", f"--stop={stop}")[1])
    assert (reply["text"], reply["stopped"]) == (whole[: whole.index(stop)], True)
    assert reply["tokens"] == whole.index(stop) + len(stop)
    reply = json.loads(ask(weights, capsys, "--prompt=abc", "--tokens=9", "--stop=never there", "--top-p=0.9")[1])
    assert (reply["tokens"], reply["stopped"], reply["top_p"]) == (9, False, 0.9)
    assert ask(weights, capsys, "--prompt=a", "--stop=")[0] == ask(weights, capsys, "--prompt=a", "--top-p=1.1")[0] == 2


def test_a_folder_means_its_newest_checkpoint(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask(weights, capsys, "--prompt=a", place=weights.parents[1])
    reply = json.loads(said)
    assert (code, reply["tokens"], reply["temperature"], reply["seed"]) == (0, 12, 0.8, 42)


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_what_a_death_in_mid_save_has_left_is_no_checkpoint(
    weights: Path, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    out = weights.parents[1]
    entry = {"name": f"checkpoints/{weights.name}", "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    named = [entry | {"kind": "weights", "step": 7}]
    (out / "MANIFEST.json").write_text(json.dumps({"v": 1, "latest": 7, "best": None, "files": named}))
    weights.with_name("000009.model.safetensors").write_bytes(weights.read_bytes())
    code, said = ask(weights, capsys, "--prompt=a", place=out / inside)
    assert (code, json.loads(said)["step"]) == (0, 7)
    (out / "MANIFEST.json").write_text("[")
    code, said = ask(weights, capsys, "--prompt=a", place=out)
    assert (code, "MANIFEST.json " in said) == (2, True)


@pytest.mark.parametrize(
    ("prompt", "fact"),
    [
        ("abZ", '"Z" (U+005A)'),
        ("a\x1b", r'"\u001b" (U+001B)'),
        ("a\udc80", r'"\udc80" (U+DC80)'),
        ("", "empty prompt"),
    ],
)
def test_a_prompt_with_an_unknown_character_is_refused_with_it(
    weights: Path, capsys: pytest.CaptureFixture[str], prompt: str, fact: str
) -> None:
    code, said = ask(weights, capsys, f"--prompt={prompt}")
    assert code == 2
    assert said.startswith("refused: ")
    assert fact in said


def test_a_text_that_is_continued_is_not_searched_for(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask(weights, capsys, "--prompt=a", "--beams=4")
    assert code == 2
    assert said.startswith("refused: --beams ")


@pytest.mark.parametrize(
    ("option", "facts"),
    [
        ("--seed=18446744073709551616", ("--seed 18446744073709551616 ", "9,223,372,036,854,775,807")),
        ("--seed=-1", ("--seed -1 ", "9,223,372,036,854,775,807")),
        ("--temperature=inf", ("sample.temperature is inf",)),
        ("--temperature=-1", ("sample.temperature is -1.0", "at least 0")),
    ],
)
def test_a_seed_or_temperature_out_of_range_is_refused(
    weights: Path, capsys: pytest.CaptureFixture[str], option: str, facts: tuple[str, ...]
) -> None:
    code, said = ask(weights, capsys, "--prompt=a", option)
    assert (code, lacking(said, "refused: ", *facts)) == (2, [])


def test_the_largest_seed_serves(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask(weights, capsys, "--prompt=a", f"--seed={2**63 - 1}")
    assert (code, json.loads(said)["seed"]) == (0, 2**63 - 1)


def test_weights_that_differ_from_the_manifest_are_refused(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit inside a tensor leaves a readable file, but the model is not the one that was trained."""
    entry = {"name": f"checkpoints/{weights.name}", "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    (weights.parents[1] / "MANIFEST.json").write_text(json.dumps({"v": 1, "files": [entry]}))
    assert ask(weights, capsys, "--prompt=a")[0] == 0
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, said = ask(weights, capsys, "--prompt=a")
    assert (code, lacking(said, weights.name, "MANIFEST.json")) == (2, [])


def test_the_prompts_ids_are_those_that_training_saw() -> None:
    char = Tokenizer("char", "", None, tuple(TOKENS))
    assert encode("abé\n", char) == [1, 2, 7, 0]
    with_end = Tokenizer("gpt2", "", 3, tuple(TOKENS))
    assert encode("", with_end) == [3]


def test_what_is_not_this_models_checkpoint_is_refused(weights: Path) -> None:
    data = weights.parents[2] / "data"
    write_state(weights, MODEL | {"width": 32}, sha256_of_tokens(TOKENS))
    with pytest.raises(Refused, match=r"attn\.c_attn\.bias is \[48\]"):
        open_checkpoint(weights, data)
    write_state(weights, MODEL | {"decoder_layers": 2}, sha256_of_tokens(TOKENS))
    with pytest.raises(Refused, match="decoder_layers"):
        open_checkpoint(weights, data)
    write_state(weights, MODEL, "0" * 64)
    with pytest.raises(Refused, match="another vocabulary"):
        open_checkpoint(weights, data)
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(Refused, match="000007"):
        open_checkpoint(weights, data)
    with pytest.raises(Refused, match=r"NNNNNN\.model\.safetensors"):
        open_checkpoint(data / "model.pt", data)


HUGE = {"layers": 2, "heads": 1, "width": 1 << 17, "context": 8}
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a model of 800 GB": (lambda state: state["recipe"]["model"].update(HUGE), r"\[393216\]"),
    "a step that no integer holds": (lambda state: state.update(step=1e999), "Infinity"),
    "a step between two": (lambda state: state.update(step=7.5), "step .*integer"),
    "a recipe that is a list": (lambda state: state.update(recipe=[]), "object"),
    "a seed that no integer holds": (lambda state: state["recipe"]["train"].update(seed="x"), "valid"),
    "a tokeniser that is none": (lambda state: state["recipe"]["data"].update(tokenizer=[1]), "tokeni[sz]er"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_state_is_refused_before_anything_is_built(what: str, weights: Path) -> None:
    change, sentence = HOSTILE[what]
    place = weights.with_name("000007.state.json")
    state = json.loads(place.read_text())
    change(state)
    place.write_text(json.dumps(state))
    with pytest.raises(Refused, match=sentence):
        open_checkpoint(weights, weights.parents[2] / "data")


@pytest.mark.parametrize(("text", "sentence"), [("[" * 100_000, "recursion"), (" " * (17 << 20), "longer than")])
def test_a_state_of_any_depth_or_length_is_refused(text: str, sentence: str, weights: Path) -> None:
    weights.with_name("000007.state.json").write_text(text)
    with pytest.raises(Refused, match=sentence):
        open_checkpoint(weights, weights.parents[2] / "data")


def test_weights_that_are_no_numbers_are_refused(weights: Path) -> None:
    model = GPT(ModelConfig(**MODEL, vocab_size=64))
    with torch.no_grad():
        model.wpe.weight[0, 0] = torch.nan
    with weights.open("wb") as file:
        write_tensors(file.write, model.state_dict())
    with pytest.raises(Refused, match=r"wpe\.weight"):
        open_checkpoint(weights, weights.parents[2] / "data")


def test_a_given_recipe_is_read_in_place_of_the_checkpoints(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = json.loads(weights.with_name("000007.state.json").read_text())["recipe"]
    write_state(weights, HUGE, sha256_of_tokens(TOKENS))
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert ask(weights, capsys, "--prompt=a", f"--recipe={tmp_path / 'recipe.json'}")[0] == 0
