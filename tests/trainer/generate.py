"""A checkpoint of an untrained model, for test_generate.py and other tests."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.tiny_training import MODEL
from trainer.checkpoint import write_tensors
from trainer.model import GPT
from trainer.recipe import ModelConfig
from trainer.tokenizer import sha256_of_tokens

TOKENS = [character.encode() for character in "\nabcdefé\ufffd"]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Write a checkpoint of an untrained model and, in `data/`, its vocabulary; return the path of the weights."""
    sha256 = sha256_of_tokens(TOKENS)
    tokenizer = {"name": "char", "sha256": sha256, "vocab_size": len(TOKENS), "eot_id": None}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/data.json").write_text(json.dumps({"v": 1, "dtype": "uint16", "tokenizer": tokenizer}))
    vocab = {"v": 1, "name": "char", "tokens_b64": [base64.b64encode(token).decode() for token in TOKENS]}
    (tmp_path / "data/vocab.json").write_text(json.dumps(vocab))
    torch.manual_seed(0)
    model = GPT(ModelConfig(**MODEL, vocab_size=64))
    path = tmp_path / "out/checkpoints/000007.model.safetensors"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        write_tensors(file.write, model.state_dict())
    write_state(path, MODEL, sha256)
    return path


def write_state(weights: Path, model: dict[str, Any], sha256: str) -> None:
    sample = {"prompts": ["a"], "tokens": 12, "temperature": 0.8, "top_k": 0}
    recipe = {"model": model, "data": {"tokenizer": "char"}, "sample": sample, "train": {"seed": 42}}
    state = {"v": 1, "step": 7, "recipe": recipe, "data": {"tokenizer": sha256}}
    weights.with_name("000007.state.json").write_text(json.dumps(state))
