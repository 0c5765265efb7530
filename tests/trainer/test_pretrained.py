"""Tests of initial weights from a published GPT-2 file or a run's checkpoint; what does not fit is refused."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.tiny_training import Train, manifest, recipe_record
from trainer.checkpoint import write_tensors
from trainer.errors import Refused
from trainer.model import GPT
from trainer.pretrained import LINEAR_NAMES, load_weights
from trainer.recipe import ModelConfig

SHAPE = {"layers": 2, "heads": 2, "width": 16, "context": 16, "vocab_size": 60}


def model(**keys: Any) -> GPT:
    torch.manual_seed(1)
    return GPT(ModelConfig(**SHAPE | keys)).eval()


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    with path.open("wb") as file:
        write_tensors(file.write, tensors)
    return path


def published(prefix: str = "", **keys: Any) -> tuple[GPT, dict[str, Tensor]]:
    """Return a model with random weights, and its tensors as GPT-2 was published: (in, out), with causal masks."""
    source = model(**keys)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_()
    tensors = {
        prefix + name: tensor.t() if name.endswith(LINEAR_NAMES) else tensor
        for name, tensor in source.state_dict().items()
    }
    for layer in range(2):
        tensors[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril().bool()
    return source, tensors


IDS = torch.arange(16)[None]
LAST = torch.tensor([15])


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_a_published_gpt2_gives_its_logits(tmp_path: Path, prefix: str) -> None:
    source, tensors = published(prefix)
    ours = model()
    load_weights(ours, written(tmp_path / "model.safetensors", tensors))
    torch.testing.assert_close(ours.next_token_logits(IDS, LAST), source.next_token_logits(IDS, LAST))
    untied = model(tied=False)
    load_weights(untied, tmp_path)  # the folder means its model.safetensors
    torch.testing.assert_close(untied.next_token_logits(IDS, LAST), source.next_token_logits(IDS, LAST))


def test_tokens_that_the_file_lacks_take_no_probability(tmp_path: Path) -> None:
    source, tensors = published()
    with torch.no_grad():
        source.ln_f.weight.zero_()
        source.ln_f.bias.fill_(1.0)
        source.wte.weight.mul_(0.01).sub_(1.0)  # Logits below zero, as GPT-2's are, and half of them closer to zero.
        source.wte.weight[:30] += 0.5
    path = written(tmp_path / "model.safetensors", tensors)
    larger = model(vocab_size=64)
    load_weights(larger, path)
    torch.testing.assert_close(larger.next_token_logits(IDS, LAST)[:, :60], source.next_token_logits(IDS, LAST))
    assert torch.softmax(larger.next_token_logits(IDS, LAST), dim=-1)[:, 60:].sum(dim=-1).max() < 1e-4


def test_a_shorter_context_takes_the_first_positions(tmp_path: Path) -> None:
    source, tensors = published()
    short = model(context=8)
    load_weights(short, written(tmp_path / "x.safetensors", tensors))
    torch.testing.assert_close(
        short.next_token_logits(IDS[:, :8], LAST - 8), source.next_token_logits(IDS[:, :8], LAST - 8)
    )


@pytest.mark.parametrize("preset", [{}, {"preset": "modern", "bias": False, "tied": False}], ids=["faithful", "modern"])
def test_a_runs_checkpoint_starts_another_run(tmp_path: Path, train: Train, preset: dict[str, Any]) -> None:
    first = recipe_record(model=preset, train={"steps": 2, "checkpoint_every": 2})
    assert train(first, tmp_path / "out") == 0
    ours = model(vocab_size=64, **preset)
    load_weights(ours, tmp_path / "out")
    untouched = [p.clone() for p in ours.parameters()]
    assert any(
        not torch.equal(a, b) for a, b in zip(untouched, model(vocab_size=64, **preset).parameters(), strict=True)
    )
    name = next(entry["name"] for entry in manifest(tmp_path / "out")["files"] if entry["kind"] == "weights")
    with pytest.raises(Refused, match="another tokeniser"):
        load_weights(ours, tmp_path / "out" / name, tokenizer_sha256="0" * 64)
    with pytest.raises(Refused, match=r"2 heads.* model\.heads is 4"):
        load_weights(model(vocab_size=64, heads=4, **preset), tmp_path / "out" / name)
    assert all(torch.equal(a, b) for a, b in zip(untouched, ours.parameters(), strict=True))


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"width": 32}, r"wte\.weight .*\[60, 16\] .*\[60, 32\]"),
        ({"vocab_size": 50}, r"wte\.weight .*\[60, 16\] .*\[50, 16\]"),
        ({"context": 17}, r"wpe\.weight .*\[16, 16\] .*\[17, 16\]"),
        ({"layers": 3}, r"h\.2\."),
        ({"layers": 1}, r"h\.1\."),
        ({"bias": False}, r"model\.bias"),
        ({"preset": "modern", "bias": False, "tied": False}, r'h\.0\.attn\.c_k\.weight.*"modern"'),
        ({"heads": 4}, r"2 heads.* model\.heads is 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_shape_is_refused_by_name_and_changes_nothing(tmp_path: Path, keys: dict[str, Any], facts: str) -> None:
    _, tensors = published()
    path = written(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 2}))
    ours = model(**keys)
    before = [p.clone() for p in ours.parameters()]
    with pytest.raises(Refused, match=facts):
        load_weights(ours, path)
    assert all(torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 16), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["wte.weight", "wpe.weight"])
def test_a_table_that_is_none_is_refused_by_name(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    _, tensors = published()
    path = written(tmp_path / "model.safetensors", {**tensors, name: torch.zeros(shape)})
    with pytest.raises(Refused, match=rf"{name} .*{re.escape(str(list(shape)))}"):
        load_weights(model(), path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("activation_function", "relu"),
        ("layer_norm_epsilon", 1e-6),
    ],
)
def test_a_network_that_only_has_gpt2s_tensors_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    _, tensors = published()
    path, config = written(tmp_path / "model.safetensors", tensors), {"n_head": 2, "activation_function": "gelu_new"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_weights(model(), path)
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(Refused, match=f"says {key} .* another model"):
        load_weights(model(), path)


def test_a_head_of_its_own_does_not_fit_a_tied_model(tmp_path: Path) -> None:
    _, tensors = published(tied=False)
    path = written(tmp_path / "model.safetensors", tensors)
    with pytest.raises(Refused, match=r"model\.tied"):
        load_weights(model(), path)
    written(path, {**tensors, "lm_head.weight": tensors["wte.weight"]})
    load_weights(model(), path)  # transformers also writes the head of a tied model


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path.touch, (tmp_path / "sprung",))  # type: ignore[return-value]

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    torch.save({"wte.weight": torch.zeros(2)}, tmp_path / "model.pt")
    for name in ("pytorch_model.bin", "model.pt"):
        with pytest.raises(Refused, match=r"safetensors .*pickle"):
            load_weights(model(), tmp_path / name)
    with pytest.raises(Refused, match="No such file"):
        load_weights(model(), tmp_path)
    assert not (tmp_path / "sprung").exists()
