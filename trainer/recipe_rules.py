"""Defines which values of a recipe's key another key's value allows, in a table for trainer/recipe.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PAIR_TOKENIZERS = _PAIRS = ("char-pairs", "word-pairs")
_PRESET, _LOOP = "model.preset", "train.loop"
_GPT = ("faithful", "modern")
_MODERN = ("modern",)
_NMT = ("encoder-decoder",)
_OLD = ("faithful", "encoder-decoder")
_HF = ("huggingface",)
_OF_MODERN: dict[str, tuple[Any, ...]] = {
    "model.softcap": (0,), "model.softcap_by": ("tanh",), "model.rotary": (1,), "model.rotary_base": (10_000,),
    "model.attention_scale": (0,), "model.value_mix": (False,), "model.gains": (False,), "model.init_gain": (1,),
    "model.stream": ("fp32",),
}  # fmt: skip
_OF_MUON: dict[str, tuple[Any, ...]] = {
    "optim.muon_lr": (0,), "optim.muon_weight_decay": (0,), "optim.cautious": (False,),
    "optim.orthogonal": ("newton-schulz",), "optim.muon_scale": ("adamw",), "optim.muon_momentum_warmup": (0,),
}  # fmt: skip
_OF_GROUPS: dict[str, tuple[Any, ...]] = {
    "optim.embed_lr": (0,), "optim.gain_lr": (0,), "optim.embed_weight_decay": (0,), "optim.gain_weight_decay": (0,),
}  # fmt: skip
ONLY: tuple[tuple[str, tuple[Any, ...], Mapping[str, tuple[Any, ...]], str], ...] = (
    (_PRESET, _NMT, {"model.tied": (True,)}, "the preset {} has no head of its own; set it to true"),
    (_PRESET, _MODERN, {"model.tied": (False,)}, "the preset {} has a head of its own; set it to false"),
    ("data.tokenizer", ("char", "gpt2", *_PAIRS), {"data.vocab_size": (0,)},
     'data.tokenizer is {}; only "bpe" trains a vocabulary of that size'),
    ("optim.kind", ("adamw",), _OF_MUON, 'optim.kind is {}; only "muon" has one'),
    ("model.tied", (True,), {"optim.head_lr": (0,)}, "model.tied is {}: the head has the embedding's rate, embed_lr"),
    (_PRESET, _OLD, _OF_MODERN, 'model.preset is {}; only "modern" has this key'),
    ("model.softcap", (0,), {"model.softcap_by": ("tanh",)}, "model.softcap is {}: there is no cap"),
    (_PRESET, _NMT, _OF_GROUPS, "the preset {} has one rate and one decay for all weights"),
    (_LOOP, _HF, _OF_GROUPS, "train.loop {} has one rate and one decay for all weights"),
    ("train.compile", (False,), {"train.compile_mode": ("default",)}, "train.compile is {}"),
    ("schedule.kind", ("cosine", "constant", "noam"), {"schedule.cooldown_fraction": (0,)},
     'schedule.kind is {}; only "trapezoid" has one'),
    ("schedule.kind", ("noam", "constant"), {"schedule.min_lr": (0,)}, "schedule.kind {} has no lowest rate"),
    (_PRESET, _NMT, {"data.tokenizer": _PAIRS}, 'the preset {} reads sentence pairs: "char-pairs" or "word-pairs"'),
    (_PRESET, _NMT, {"train.compile": (False,)},
     "the preset {} meets other lengths in every batch; set it to false"),
    (_PRESET, _NMT, {"train.init_from": ("",)}, "the preset {} starts from weights of its own"),
    (_PRESET, _NMT, {"data.order": ("permuted",), "eval.order": ("permuted",)}, "the preset {} draws its pairs"),
    (_PRESET, _NMT, {"eval.hellaswag_items": (0,), "eval.core": (0,)}, "the preset {} continues no text; set it to 0"),
    (_PRESET, _NMT, {"sample.top_k": (0,)},
     "the preset {} searches for its translations and draws none; set it to 0"),
    (_PRESET, _GPT, {"data.tokenizer": ("char", "gpt2", "bpe")},
     'model.preset is {}; only "encoder-decoder" reads sentence pairs'),
    (_PRESET, _GPT, {"train.label_smoothing": (0,)}, 'model.preset is {}; only "encoder-decoder" has one'),
    (_PRESET, _GPT, {"sample.beams": (1,), "sample.length_penalty": (0.6,)},
     'model.preset is {}; only "encoder-decoder" searches'),
    (_LOOP, _HF, {"model.preset": ("faithful",)}, 'train.loop {} has only "faithful"'),
    (_LOOP, _HF, {"model.bias": (True,), "model.tied": (True,)}, "train.loop {} has only true"),
    (_LOOP, _HF, {"optim.kind": ("adamw",)}, 'train.loop {} has only "adamw"'),
    (_LOOP, _HF, {"train.compile": (False,)}, "train.loop {} has only false"),
    (_LOOP, _HF, {"train.spike": ("off",)}, 'train.loop {} has only "off"'),
    (_LOOP, _HF, {"train.precision": ("auto", "bf16", "fp32")}, 'train.loop {} has only "fp32" and "bf16"'),
    (_LOOP, _HF, {"train.parallel": ("auto", "ddp")}, "train.loop {} trains in one process"),
)  # fmt: skip
"""Each row: if the first key has one of the values, each key of the mapping must have one of the values beside it.

The last entry of a row is the reason.
"""
