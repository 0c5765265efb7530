"""Tests that the trainer's own schema refuses contradictory recipe keys before a machine is rented."""

from __future__ import annotations

from typing import Any

import pytest

from gpurun.core.errors import UsageError
from gpurun.jobs.training.recipe import check_tables, load_recipe, resolve
from gpurun.remote.messages import MOST_MANIFEST_FILES
from tests.refusals import refusal
from trainer.recipe import MOST_SAMPLES, TABLES

MODERN = {"preset": "modern", "bias": False, "tied": False}
TRANSLATION = {"model": {"preset": "encoder-decoder"}, "data": {"tokenizer": "word-pairs"}}
HUGGINGFACE = {"loop": "huggingface", "spike": "off"}
BASE = resolve(load_recipe("mini-gpt"), "full").record
"""mini-gpt in its full form: 2 layers, 2 heads, width 64, 500 steps."""


def with_keys(**tables: dict[str, Any]) -> dict[str, Any]:
    return {name: BASE[name] | tables.get(name, {}) for name in TABLES} | {"about": BASE["about"]}


@pytest.mark.parametrize(
    ("tables", "facts"),
    [
        ({"model": {"heads": 3}}, ("model.width 64", "model.heads 3")),
        ({"model": MODERN | {"tied": True}}, ("model.tied is true", '"modern"')),
        ({"model": MODERN | {"heads": 64}}, ("model.width 64", "model.heads 64")),
        ({"optim": {"muon_lr": 0.02}}, ("optim.muon_lr is 0.02", 'optim.kind is "adamw"')),
        ({"optim": {"cautious": True}}, ("optim.cautious is true", 'optim.kind is "adamw"', '"muon"')),
        ({"optim": {"head_lr": 0.1}}, ("optim.head_lr is 0.1", "model.tied is true")),
        (
            {"model": {"softcap": 15}},
            ("model.softcap is 15.0", 'model.preset is "faithful"', '"modern"'),
        ),
        ({"model": {"gains": True}}, ("model.gains is true", 'model.preset is "faithful"', '"modern"')),
        (
            {"model": MODERN | {"softcap_by": "root"}},
            ('model.softcap_by is "root"', "model.softcap is 0.0"),
        ),
        (
            {"optim": {"muon_scale": "aspect"}},
            ('optim.muon_scale is "aspect"', 'optim.kind is "adamw"', '"muon"'),
        ),
        (
            {"train": {"compile_mode": "max-autotune-no-cudagraphs"}},
            ('train.compile_mode is "max-autotune-no-cudagraphs"', "train.compile is false"),
        ),
        ({"schedule": {"min_lr": 1e-5}}, ("schedule.min_lr is 1e-05", 'schedule.kind "constant"')),
        ({"schedule": {"kind": "cosine", "min_lr": 1.0}}, ("schedule.min_lr 1.0", "optim.lr 0.0003")),
        ({"schedule": {"warmup_steps": 501}}, ("schedule.warmup_steps 501", "train.steps 500")),
        ({"schedule": {"kind": "trapezoid"}}, ('schedule.kind "trapezoid"', "schedule.cooldown_fraction")),
        (
            {"schedule": {"cooldown_fraction": 0.4}},
            ("schedule.cooldown_fraction is 0.4", 'schedule.kind is "constant"'),
        ),
        (
            {"schedule": {"kind": "trapezoid", "warmup_steps": 301, "cooldown_fraction": 0.4}},
            ("schedule.warmup_steps 301", "200", "train.steps 500"),
        ),
        ({"data": {"vocab_size": 512}}, ("data.vocab_size is 512", 'data.tokenizer is "char"', '"bpe"')),
        ({"schedule": {"kind": "noam"}}, ('schedule.kind "noam"', "schedule.warmup_steps")),
        (
            {"schedule": {"kind": "noam", "warmup_steps": 9, "min_lr": 1e-5}},
            ("schedule.min_lr is 1e-05", 'schedule.kind "noam"'),
        ),
        (
            {"sample": {"prompts": ["a"] * 90}, "train": {"steps": 1001, "checkpoint_every": 10}},
            ("90", "sample.prompts", "101", "9090", "9000"),
        ),
        ({"model": {"preset": "encoder-decoder", "tied": False}}, ("model.tied is false",)),
        ({"model": {"preset": "encoder-decoder"}}, ('data.tokenizer is "char"', '"encoder-decoder"')),
        (TRANSLATION | {"train": {"compile": True}}, ("train.compile is true",)),
        (TRANSLATION | {"train": {"init_from": "gpt2"}}, ('train.init_from is "gpt2"',)),
        (TRANSLATION | {"eval": {"hellaswag_items": 9}}, ("eval.hellaswag_items is 9",)),
        (TRANSLATION | {"sample": {"top_k": 5}}, ("sample.top_k is 5",)),
        ({"data": {"tokenizer": "word-pairs"}}, ('data.tokenizer is "word-pairs"', 'model.preset is "faithful"')),
        ({"train": {"label_smoothing": 0.1}}, ("train.label_smoothing is 0.1", 'model.preset is "faithful"')),
        (
            {"sample": {"beams": 4}},
            ("sample.beams is 4", 'model.preset is "faithful"', '"encoder-decoder"'),
        ),
        (
            {"sample": {"length_penalty": 1.0}},
            ("sample.length_penalty is 1.0", 'model.preset is "faithful"', '"encoder-decoder"'),
        ),
        (
            {"model": MODERN, "train": HUGGINGFACE},
            ('model.preset is "modern"', 'train.loop "huggingface"', '"faithful"'),
        ),
        ({"optim": {"kind": "muon"}, "train": HUGGINGFACE}, ('optim.kind is "muon"', 'train.loop "huggingface"')),
        ({"train": HUGGINGFACE | {"compile": True}}, ("train.compile is true", 'train.loop "huggingface"')),
        ({"train": HUGGINGFACE | {"spike": "warn"}}, ('train.spike is "warn"', 'train.loop "huggingface"')),
        ({"train": HUGGINGFACE | {"precision": "fp16"}}, ('train.precision is "fp16"', 'train.loop "huggingface"')),
        ({"train": HUGGINGFACE | {"parallel": "fsdp"}}, ('train.parallel is "fsdp"', 'train.loop "huggingface"')),
    ],
)
def test_it_is_refused_with_both_keys_and_values(tables: dict[str, dict[str, Any]], facts: tuple[str, ...]) -> None:
    with refusal(UsageError, "recipe.does_not_add_up", "mine.toml", *facts):
        check_tables(with_keys(**tables), where="mine.toml")


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
