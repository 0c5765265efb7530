"""Keys that make no sense together are refused before anything is rented, by the trainer's own schema."""

from __future__ import annotations

from typing import Any

import pytest

from gpurun.core.errors import UsageError
from gpurun.jobs.training.recipe import check_tables, load_recipe, resolve
from gpurun.remote.messages import MOST_MANIFEST_FILES
from trainer.recipe import MOST_SAMPLES, TABLES

MODERN = {"preset": "modern", "bias": False, "tied": False}
TRANSLATION = {"model": {"preset": "encoder-decoder"}, "data": {"tokenizer": "word-pairs"}}
HUGGINGFACE = {"loop": "huggingface", "spike": "off"}
BASE = resolve(load_recipe("mini-gpt"), "full").record
"""2 layers, 2 heads, 64 wide; 500 steps."""


def with_keys(**tables: dict[str, Any]) -> dict[str, Any]:
    return {name: BASE[name] | tables.get(name, {}) for name in TABLES} | {"about": BASE["about"]}


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"model": {"heads": 3}}, "model.width 64 cannot be shared equally by model.heads 3"),
        ({"model": MODERN | {"tied": True}}, 'model.tied is true, but the preset "modern" has a head of its own'),
        ({"model": MODERN | {"heads": 64}}, "model.width 64 by model.heads 64 is 1; a rotation needs an even number"),
        ({"optim": {"muon_lr": 0.02}}, 'optim.muon_lr is 0.02, but optim.kind is "adamw"'),
        ({"optim": {"cautious": True}}, 'optim.cautious is true, but optim.kind is "adamw"; only "muon" has one'),
        ({"optim": {"head_lr": 0.1}}, "optim.head_lr is 0.1, but model.tied is true: the head has the embedding's"),
        (
            {"model": {"softcap": 15}},
            'model.softcap is 15.0, but model.preset is "faithful"; only "modern" has this key',
        ),
        ({"model": {"gains": True}}, 'model.gains is true, but model.preset is "faithful"; only "modern" has this key'),
        (
            {"model": MODERN | {"softcap_by": "root"}},
            'model.softcap_by is "root", but model.softcap is 0.0: there is no cap',
        ),
        (
            {"optim": {"muon_scale": "aspect"}},
            'optim.muon_scale is "aspect", but optim.kind is "adamw"; only "muon" has one',
        ),
        (
            {"train": {"compile_mode": "max-autotune-no-cudagraphs"}},
            'train.compile_mode is "max-autotune-no-cudagraphs", but train.compile is false',
        ),
        ({"schedule": {"min_lr": 1e-5}}, 'schedule.min_lr is 1e-05, but schedule.kind "constant" has no lowest rate'),
        ({"schedule": {"kind": "cosine", "min_lr": 1.0}}, "schedule.min_lr 1.0 is above optim.lr 0.0003"),
        ({"schedule": {"warmup_steps": 501}}, "schedule.warmup_steps 501 is more than train.steps 500"),
        ({"schedule": {"kind": "trapezoid"}}, 'schedule.kind "trapezoid" needs a schedule.cooldown_fraction above 0'),
        (
            {"schedule": {"cooldown_fraction": 0.4}},
            'schedule.cooldown_fraction is 0.4, but schedule.kind is "constant"',
        ),
        (
            {"schedule": {"kind": "trapezoid", "warmup_steps": 301, "cooldown_fraction": 0.4}},
            "schedule.warmup_steps 301 and a cool-down of 200 steps are more than train.steps 500",
        ),
        ({"data": {"vocab_size": 512}}, 'data.vocab_size is 512, but data.tokenizer is "char"; only "bpe" trains'),
        ({"schedule": {"kind": "noam"}}, 'schedule.kind "noam" needs a schedule.warmup_steps of at least 1'),
        (
            {"schedule": {"kind": "noam", "warmup_steps": 9, "min_lr": 1e-5}},
            'schedule.min_lr is 1e-05, but schedule.kind "noam" has no lowest rate',
        ),
        (
            {"sample": {"prompts": ["a"] * 90}, "train": {"steps": 1001, "checkpoint_every": 10}},
            "90 sample.prompts at each of 101 checkpoints make 9090 samples; at most 9000 come home",
        ),
        ({"model": {"preset": "encoder-decoder", "tied": False}}, "model.tied is false, but the preset"),
        ({"model": {"preset": "encoder-decoder"}}, 'data.tokenizer is "char", but the preset "encoder-decoder" reads'),
        (TRANSLATION | {"train": {"compile": True}}, "train.compile is true, but the preset"),
        (TRANSLATION | {"train": {"init_from": "gpt2"}}, 'train.init_from is "gpt2", but the preset'),
        (TRANSLATION | {"eval": {"hellaswag_items": 9}}, "eval.hellaswag_items is 9, but the preset"),
        (TRANSLATION | {"sample": {"top_k": 5}}, "sample.top_k is 5, but the preset"),
        ({"data": {"tokenizer": "word-pairs"}}, 'data.tokenizer is "word-pairs", but model.preset is "faithful"; only'),
        ({"train": {"label_smoothing": 0.1}}, 'train.label_smoothing is 0.1, but model.preset is "faithful"; only'),
        (
            {"sample": {"beams": 4}},
            'sample.beams is 4, but model.preset is "faithful"; only "encoder-decoder" searches',
        ),
        (
            {"sample": {"length_penalty": 1.0}},
            'sample.length_penalty is 1.0, but model.preset is "faithful"; only "encoder-decoder" searches',
        ),
        (
            {"model": MODERN, "train": HUGGINGFACE},
            'model.preset is "modern", but train.loop "huggingface" has only "faithful"',
        ),
        ({"optim": {"kind": "muon"}, "train": HUGGINGFACE}, 'optim.kind is "muon", but train.loop "huggingface" has'),
        ({"train": HUGGINGFACE | {"compile": True}}, 'train.compile is true, but train.loop "huggingface" has'),
        ({"train": HUGGINGFACE | {"spike": "warn"}}, 'train.spike is "warn", but train.loop "huggingface" has'),
        ({"train": HUGGINGFACE | {"precision": "fp16"}}, 'train.precision is "fp16", but train.loop "huggingface" has'),
        ({"train": HUGGINGFACE | {"parallel": "fsdp"}}, 'train.parallel is "fsdp", but train.loop "huggingface" trai'),
    ],
)
def test_it_is_refused_with_both_keys_and_values(tables: dict[str, dict[str, Any]], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_tables(with_keys(**tables), where="mine.toml")
    assert refused.value.what.startswith(f"mine.toml: {sentence}")
    assert refused.value.code == "recipe.does_not_add_up"


@pytest.mark.parametrize(
    "tables",
    [
        {"model": MODERN, "optim": {"kind": "muon", "muon_lr": 0.02}},
        {"schedule": {"kind": "trapezoid", "warmup_steps": 300, "cooldown_fraction": 0.4, "min_lr": 1e-5}},
        {"schedule": {"kind": "noam", "warmup_steps": 1}, "optim": {"lr": 1.0}},
        {"train": HUGGINGFACE},
        {"sample": {"prompts": ["a"] * 90}, "train": {"steps": 1000, "checkpoint_every": 10}},
        {"data": {"tokenizer": "bpe", "vocab_size": 257}},
        TRANSLATION | {"train": {"label_smoothing": 0.1}, "sample": {"beams": 4, "length_penalty": 0.0}},
    ],
)
def test_what_makes_sense_passes(tables: dict[str, dict[str, Any]]) -> None:
    assert check_tables(with_keys(**tables), where="mine.toml").model.layers == 2


def test_a_runs_samples_all_fit_a_manifest_beside_checkpoints() -> None:
    files_of_checkpoints, compile_cache = 3 * 3, 1
    assert MOST_SAMPLES + files_of_checkpoints + compile_cache <= MOST_MANIFEST_FILES
