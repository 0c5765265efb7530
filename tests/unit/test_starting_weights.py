"""Tests of weights to start from: they are beside the shards, are uploaded and counted, and are refused if unfit."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.run_plan import DataSummary, Earlier
from gpurun.data.prepare import PrepareOrder, prepare
from gpurun.data.run_shards import prepare_run_shards
from gpurun.jobs.training import initial_weights
from gpurun.jobs.training.initial_weights import INIT_FOLDER, add_initial_weights, take_checkpoint, weights_of
from gpurun.jobs.training.recipe import ResolvedRecipe, load_recipe, resolve
from gpurun.remote.archive import survey
from tests.refusals import refusal
from tests.unit.report_samples import plan_of
from trainer import pretrained
from trainer.checkpoint import write_tensors
from trainer.errors import Refused
from trainer.model import GPT
from trainer.pretrained import find_weights, load_weights
from trainer.recipe import ModelConfig

SHAPE = {"layers": 2, "heads": 2, "width": 64, "context": 64}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return a folder of character shards, with a GPT of mini-gpt's shape beside them as transformers writes it."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The quick brown fox no. {number} jumps over the lazy dog.\n" for number in range(200)))
    prepare(PrepareOrder(str(text), "char", tmp_path / "shards"), print)
    gpt2 = tmp_path / "shards" / "gpt2"
    gpt2.mkdir()
    write(gpt2 / "model.safetensors")
    (gpt2 / "config.json").write_text(json.dumps({"n_head": 2}))
    return tmp_path / "shards"


def write(path: Path, **keys: Any) -> None:
    with path.open("wb") as file:
        write_tensors(file.write, GPT(ModelConfig(**SHAPE | {"vocab_size": 30} | keys)).state_dict())


def recipe(name: str = "gpt2", *wishes: str) -> ResolvedRecipe:
    return resolve(load_recipe("mini-gpt"), "full", (f'train.init_from="{name}"', *wishes))


def data_of(source: Path, resolved: ResolvedRecipe) -> DataSummary:
    into = source.parent / "into"
    return prepare_run_shards(resolved.record, str(source), into=into, cache=source.parent / "cache", say=print)


def shipped(data: DataSummary, resolved: ResolvedRecipe, **changes: Any) -> set[str]:
    plan = plan_of("fox-41")
    job = plan.job.model_copy(update={"resolved": resolved.record})
    plan = plan.model_copy(update={"data": data, "job": job, **changes})
    return {
        file.name
        for file in survey(plan.job.workload(plan, bundle_root() / "trainer", cpus=1).uploads).files
        if "data/" in file.name
    }


def test_weights_beside_the_shards_are_shipped_and_counted(shards: Path) -> None:
    data = data_of(shards, recipe())
    found = add_initial_weights(data, recipe())
    assert shipped(found, recipe()) - shipped(found, recipe("")) == {
        "data/gpt2/model.safetensors", "data/gpt2/config.json",
    }  # fmt: skip
    assert found.bytes - data.bytes == sum(file.stat().st_size for file in (shards / "gpt2").iterdir())


def checkpoint_of_nanogpt(path: Path, rows: int) -> Path:
    weights = GPT(ModelConfig(**SHAPE | {"vocab_size": rows})).state_dict()
    args = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "bias": True, "vocab_size": rows}
    torch.save({"model": {f"transformer.{name}": one for name, one in weights.items()}, "model_args": args}, path)
    return path


@pytest.mark.parametrize("source", ["shards", "text.txt"])
def test_a_nanogpt_checkpoint_goes_with_shards_and_with_text(shards: Path, source: str) -> None:
    resolved = recipe(INIT_FOLDER)
    data = data_of(shards.parent / source, resolved)
    into = shards.parent / "into"
    take_checkpoint(checkpoint_of_nanogpt(shards.parent / "ckpt.pt", data.vocab_size), into)
    found = add_initial_weights(data, resolved, into)
    made = {f"data/{INIT_FOLDER}/{name}" for name in ("model.safetensors", "config.json")}
    assert made <= shipped(found, resolved)
    assert found.bytes - data.bytes == sum(file.stat().st_size for file in (into / INIT_FOLDER).iterdir())
    load_weights(GPT(ModelConfig(**SHAPE), data.vocab_size), into / INIT_FOLDER)
    take_checkpoint(checkpoint_of_nanogpt(shards.parent / "ckpt.pt", data.vocab_size - 2), into)
    with refusal(UsageError, "weights.unfit", "39 tokens", "41"):
        add_initial_weights(data, resolved, into)


def test_what_is_no_checkpoint_is_refused_at_home(tmp_path: Path) -> None:
    with refusal(UsageError, "init.missing"):
        take_checkpoint(tmp_path / "ckpt.pt", tmp_path)
    (tmp_path / "ckpt.pt").write_bytes(b"no checkpoint")
    with refusal(UsageError, "init.refused", "torch 1.6"):
        take_checkpoint(tmp_path / "ckpt.pt", tmp_path)


def test_a_run_continued_from_a_checkpoint_ships_no_weights(shards: Path) -> None:
    earlier = Earlier(run="elk-40", step=3, bytes=1, receipt_sha256="0" * 64, spent_micros=None)
    data, going_on = data_of(shards, recipe()), replace(recipe(), earlier=earlier)
    shutil.rmtree(shards / "gpt2")
    assert add_initial_weights(data, going_on) == data
    assert shipped(data, going_on, continues=earlier) == shipped(data, recipe(""))


@pytest.mark.parametrize("name", ["gpt2", "gpt2/model.safetensors", "out", "out/checkpoints", "run"])
def test_a_name_means_the_file_that_the_trainer_finds(shards: Path, name: str) -> None:
    for folder, steps in {"out/checkpoints": (2, 10), "run": (7,)}.items():
        (shards / folder).mkdir(parents=True)
        for step in steps:
            write(shards / folder / f"{step:06d}.model.safetensors")
            (shards / folder / f"{step:06d}.state.json").write_text("{}")
    found, beside = weights_of(shards, name)
    assert shards / found == find_weights(shards / name)
    assert beside == found.replace("model.safetensors", "config.json" if "gpt2" in name else "state.json")


def test_a_save_cut_by_a_death_is_not_taken_to_start_from(shards: Path) -> None:
    (shards / "out/checkpoints").mkdir(parents=True)
    for step in (2, 10):
        write(shards / f"out/checkpoints/{step:06d}.model.safetensors")
    manifest = shards / "out/MANIFEST.json"
    manifest.write_text(json.dumps({"files": [{"name": "checkpoints/000002.model.safetensors"}]}))
    assert list(weights_of(shards, "out")) == ["out/checkpoints/000002.model.safetensors"]
    assert find_weights(shards / "out").name == "000002.model.safetensors", "as the trainer has it"
    manifest.write_text("[]")
    with refusal(UsageError, "weights.unfit", "MANIFEST.json"):
        weights_of(shards, "out")


@pytest.mark.parametrize(
    ("resolved", "code", "facts"),
    [
        (recipe("none"), "weights.missing", ("/none",)),
        (recipe("gpt2", "model.layers=3"), "weights.unfit", ("2 layers of width 64", "3 of 64")),
        (recipe("gpt2", "model.width=32"), "weights.unfit", ("2 layers of width 64", "2 of 32")),
        (recipe("gpt2", "model.context=65", "train.batch_tokens=4160"), "weights.unfit", ("64 positions",)),
        (recipe("gpt2", "model.heads=4"), "weights.unfit", ("2 heads", "model.heads is 4")),
    ],
)
def test_weights_the_trainer_would_refuse_are_refused_at_home(
    shards: Path, resolved: ResolvedRecipe, code: str, facts: tuple[str, ...]
) -> None:
    data = data_of(shards, recipe())
    with refusal(UsageError, code, *facts):
        add_initial_weights(data, resolved)


def test_an_export_of_other_characters_is_refused_at_home(shards: Path) -> None:
    data, config = data_of(shards, recipe()), {"n_head": 2, pretrained.TOKENIZER_KEY: "0" * 64}
    (shards / "gpt2" / "config.json").write_text(json.dumps(config))
    with refusal(UsageError, "weights.unfit", "tokeniser"):
        add_initial_weights(data, recipe())
    config[pretrained.TOKENIZER_KEY] = data.tokenizer_sha256
    (shards / "gpt2" / "config.json").write_text(json.dumps(config))
    assert add_initial_weights(data, recipe()).bytes > data.bytes


MODERN = {"preset": "modern", "bias": False, "tied": False}


@pytest.mark.parametrize(
    ("held", "wishes", "words"),
    [
        ({}, ["model.bias=false"], "model.bias is false"),
        ({"bias": False}, [], "model.bias is true"),
        ({"tied": False}, [], "model.tied is true"),
        ({}, ["model.preset=modern", "model.bias=false", "model.tied=false"], 'preset "faithful"'),
        (MODERN, [], 'model.preset is "faithful"'),
    ],
)
def test_weights_of_another_kind_of_network_are_refused_at_home(
    shards: Path, held: dict[str, Any], wishes: list[str], words: str
) -> None:
    """The weights have the recipe's shapes, but other names or values: gpurun must refuse them, as the trainer does."""
    path = shards / "gpt2" / "model.safetensors"
    model = GPT(ModelConfig(**SHAPE | {"vocab_size": 64} | held))
    for name, tensor in model.state_dict().items():
        tensor += 0.5 if name.endswith(".bias") else 0
    with path.open("wb") as file:
        write_tensors(file.write, model.state_dict())
    wanted = recipe("gpt2", *wishes)
    with pytest.raises(UsageError, match=words) as refused:
        add_initial_weights(data_of(shards, wanted), wanted)
    assert refused.value.code == "weights.unfit"
    with pytest.raises(Refused):
        load_weights(GPT(ModelConfig(**wanted.record["model"] | {"vocab_size": 64})), path)


def test_weights_the_trainer_fits_to_the_network_are_accepted(shards: Path) -> None:
    """Accept zero biases, as in an export, a head equal to the embedding, causal masks, and a missing head."""
    path = shards / "gpt2" / "model.safetensors"
    state = GPT(ModelConfig(**SHAPE | {"vocab_size": 30})).state_dict()
    for name, tensor in state.items():
        tensor *= 0 if name.endswith(".bias") else 1
    state |= {"lm_head.weight": state["wte.weight"].clone(), "h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    with path.open("wb") as file:
        write_tensors(file.write, state)
    for wishes in (["model.bias=false"], [], ["model.tied=false"]):
        wanted = recipe("gpt2", *wishes)
        assert add_initial_weights(data_of(shards, wanted), wanted).bytes
        load_weights(GPT(ModelConfig(**wanted.record["model"] | {"vocab_size": 64})), path)


def test_damaged_and_foreign_tokeniser_weights_are_refused_here(shards: Path) -> None:
    data, path = data_of(shards, recipe()), shards / "000004.model.safetensors"
    write(path)
    state = {"recipe": {"model": {"heads": 2}}, "data": {"tokenizer": data.tokenizer_sha256}}
    path.with_name("000004.state.json").write_text(json.dumps(state))
    assert add_initial_weights(data, recipe(path.name)).bytes > data.bytes
    path.with_name("000004.state.json").write_text(json.dumps(state | {"data": {"tokenizer": "0" * 64}}))
    with refusal(UsageError, "weights.unfit", "tokeniser"):
        add_initial_weights(data, recipe(path.name))
    whole = path.read_bytes()
    nested, endless = b"[" * 100_000, b'{"x":{"dtype":"F32","shape":[1e999],"data_offsets":[0,0]}}'
    lying = [len(header).to_bytes(8, "little") + header for header in (nested, endless)]
    for damaged in (whole[:-1], whole + b"\0", b"version https://git-lfs.github.com/spec/v1\n", b"", *lying):
        path.write_bytes(damaged)
        with refusal(UsageError, "weights.unfit", path.name, "safetensors"):
            add_initial_weights(data, recipe(path.name))
    torch.save({"wte.weight": torch.zeros(2, 2)}, path)
    with refusal(UsageError, "weights.unfit", path.name, "safetensors"):
        add_initial_weights(data, recipe(path.name))


def test_merely_gpt2_shaped_weights_fail_the_trainers_own_rule(shards: Path) -> None:
    config = {"n_head": 2, "scale_attn_by_inverse_layer_idx": True}
    (shards / "gpt2" / "config.json").write_text(json.dumps(config))
    with refusal(UsageError, "weights.unfit", "scale_attn_by_inverse_layer_idx"):
        add_initial_weights(data_of(shards, recipe()), recipe())
    assert initial_weights.AS_PUBLISHED == pretrained.AS_PUBLISHED


def test_text_has_no_folder_in_which_weights_could_lie(shards: Path) -> None:
    data = data_of(shards.parent / "text.txt", recipe())
    with refusal(UsageError, "weights.no_folder") as refused:
        add_initial_weights(data, recipe())
    assert "gpurun data prepare" in refused.value.hint


def tied_state() -> dict[str, torch.Tensor]:
    """Return the state of a GPT-2 as transformers has it: the head is the embedding, and one weight is transposed."""
    state = GPT(ModelConfig(**SHAPE | {"vocab_size": 30})).state_dict()
    name = "h.0.attn.c_proj.weight"
    return state | {"lm_head.weight": state["wte.weight"], name: state[name].t().contiguous().t()}


def in_parts(folder: Path, kind: str) -> list[str]:
    """Write weights in two parts with an index, as transformers writes large weights; return the parts' names."""
    state, names = tied_state(), [f"{kind}-{part:05d}-of-00002" for part in (1, 2)]
    ending = "safetensors" if kind == "model" else "bin"
    for name, held in zip(names, (list(state)[::2], list(state)[1::2]), strict=True):
        part = {one: state[one].contiguous() for one in held}
        if ending == "bin":
            torch.save(part, folder / f"{name}.bin")
        else:
            with (folder / f"{name}.safetensors").open("wb") as file:
                write_tensors(file.write, part)
    (folder / f"{kind}.{ending}.index.json").write_text("{}")
    return [f"{name}.{ending}" for name in names]


@pytest.mark.parametrize("named", ["gpt2", "the file"])
@pytest.mark.parametrize("kind", ["model", "pytorch_model", "whole pickle"])
def test_weights_in_parts_or_pickles_get_the_line_to_merge_them(shards: Path, kind: str, named: str) -> None:
    folder = shards / "gpt2"
    (folder / "model.safetensors").unlink()
    if kind == "whole pickle":
        torch.save(tied_state(), folder / "pytorch_model.bin")
        files = ["pytorch_model.bin"]
    else:
        files = in_parts(folder, kind)
    data, asked = data_of(shards, recipe()), recipe("gpt2" if named == "gpt2" else f"gpt2/{files[0]}")
    with refusal(UsageError, "weights.parts", str(folder), *files) as refused:
        add_initial_weights(data, asked)
    if named == "gpt2":
        with pytest.raises(Refused, match=re.escape(files[0])):
            load_weights(GPT(ModelConfig(**SHAPE | {"vocab_size": 64})), folder)
    command = shlex.split(refused.value.hint.splitlines()[-1])
    assert command.pop(0) == "python"
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert add_initial_weights(data, recipe()).bytes > data.bytes
    load_weights(GPT(ModelConfig(**SHAPE | {"vocab_size": 64})), folder)
    if named != "gpt2":
        with refusal(UsageError, "weights.parts", "model.safetensors"):
            add_initial_weights(data, asked)


@pytest.mark.parametrize(("there", "fact"), [([1], "1 of 2 parts"), ([], "index.json")], ids=["one", "none"])
def test_of_weights_in_parts_what_is_missing_is_said_first(shards: Path, there: list[int], fact: str) -> None:
    folder = shards / "gpt2"
    (folder / "model.safetensors").unlink()
    for part, name in enumerate(in_parts(folder, "model"), 1):
        if part not in there:
            (folder / name).unlink()
    with refusal(UsageError, "weights.parts", fact):
        add_initial_weights(data_of(shards, recipe()), recipe())
