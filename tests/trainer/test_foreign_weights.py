"""Tests that weights of nanoGPT and minGPT are the same network in both directions, and that no pickle is executed."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.trainer.tiny_training import MODEL
from trainer.checkpoint import write_tensors
from trainer.errors import Refused
from trainer.export import export_other
from trainer.foreign_weights import main, read_foreign
from trainer.model import GPT
from trainer.pretrained import load_weights
from trainer.recipe import ModelConfig

SHAPE = {"layers": 2, "heads": 2, "width": 16, "context": 16, "vocab_size": 12}


def compute_reference_logits(weights: dict[str, Tensor], ids: Tensor, heads: int, gelu: str) -> Tensor:
    """Return a GPT's logits as nanoGPT and minGPT compute them, from published papers and tensor names alone."""
    w = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    norm = lambda x, at: F.layer_norm(x, x.shape[-1:], w[f"{at}.weight"], w.get(f"{at}.bias"))  # noqa: E731
    linear = lambda x, at: F.linear(x, w[f"{at}.weight"], w.get(f"{at}.bias"))  # noqa: E731
    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
    for layer in range(sum(name.endswith("ln_1.weight") for name in w)):
        h = f"h.{layer}"
        q, k, v = linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.view(len(ids), heads, -1).transpose(0, 1) for part in (q, k, v))
        scores = (q @ k.transpose(1, 2)) / k.shape[-1] ** 0.5
        hidden = torch.ones(len(ids), len(ids)).triu(1).bool()
        y = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v
        x = x + linear(y.transpose(0, 1).reshape(len(ids), -1), f"{h}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate=gelu), f"{h}.mlp.c_proj")
    return norm(x, "ln_f") @ w["lm_head.weight"].T


def nanogpt_checkpoint(path: Path, *, prefix: str = "", bias: bool = True, **changes: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = GPT(ModelConfig(**SHAPE, bias=bias))  # type: ignore[arg-type]
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    weights = {f"{prefix}transformer.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    weights[f"{prefix}lm_head.weight"] = weights[f"{prefix}transformer.wte.weight"]
    args = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "bias": bias, "vocab_size": 12, "dropout": 0.0}
    optimizer = torch.optim.AdamW(model.parameters())
    record = {"model": weights, "model_args": args, "iter_num": 9, "best_val_loss": torch.tensor(1.0)}
    torch.save({**record, "optimizer": optimizer.state_dict(), "config": {"dataset": "x"}, **changes}, path)
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}


def logits_of(model: GPT, ids: Tensor) -> Tensor:
    rows = [model.next_token_logits(ids[None, : at + 1], torch.tensor([at]))[0] for at in range(len(ids))]
    return torch.stack(rows)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_a_run_from_nanogpts_checkpoint_is_its_network(tmp_path: Path, prefix: str, bias: bool) -> None:
    weights = nanogpt_checkpoint(tmp_path / "ckpt.pt", prefix=prefix, bias=bias)
    assert main([str(tmp_path / "ckpt.pt"), str(tmp_path / "init")]) == 0
    model = GPT(ModelConfig(**SHAPE, bias=bias)).eval()  # type: ignore[arg-type]
    load_weights(model, tmp_path / "init")
    ids = torch.tensor([1, 5, 11, 0, 3, 3, 7])
    with torch.no_grad():
        ours = logits_of(model, ids)
    assert torch.allclose(ours, compute_reference_logits(weights, ids, 2, "tanh"), atol=1e-5)
    # nanoGPT's GELU is exact; GPT-2's and ours are the tanh approximation.
    assert torch.allclose(ours, compute_reference_logits(weights, ids, 2, "none"), atol=1e-2)
    with pytest.raises(Refused, match="2 heads"):
        load_weights(GPT(ModelConfig(**{**SHAPE, "heads": 4}, bias=bias)), tmp_path / "init")  # type: ignore[arg-type]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Write a checkpoint of a character model of this trainer, trained on a file; return the path of its weights."""
    from tests.trainer.generate import weights as made

    path: Path = made.__wrapped__(tmp_path)  # type: ignore[attr-defined]
    state = path.with_name("000007.state.json")
    fields = json.loads(state.read_text())
    fields["recipe"]["data"]["source"] = "file"
    state.write_text(json.dumps(fields))
    manifest = tmp_path / "data/data.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"train": [], "source": {"kind": "file"}}))
    return path


@pytest.mark.parametrize("form", ["nanogpt", "mingpt"])
def test_an_export_to_them_is_the_same_network_there_and_back(tmp_path: Path, weights: Path, form: str) -> None:
    data = weights.parents[2] / "data"
    written = export_other(form, weights, tmp_path / "to", data=data)
    assert written == {"nanogpt": ["ckpt.pt", "meta.pkl"], "mingpt": ["config.json", "model.pt"]}[form]
    name = {"nanogpt": "ckpt.pt", "mingpt": "model.pt"}[form]
    record = torch.load(tmp_path / "to" / name, weights_only=True)
    record = record["model"] if form == "nanogpt" else record
    model = GPT(ModelConfig(**MODEL, vocab_size=64)).eval()
    load_weights(model, weights)
    ids = torch.tensor([1, 2, 0, 3])
    rows = len(record["lm_head.weight"])
    with torch.no_grad():
        ours = logits_of(model, ids)[:, :rows]
    assert torch.allclose(ours, compute_reference_logits(record, ids, MODEL["heads"], "tanh"), atol=1e-5)
    tensors, heads = read_foreign(tmp_path / "to" / name)
    assert heads == MODEL["heads"]
    assert all(torch.equal(tensors[key][:rows], tensor[:rows]) for key, tensor in model.state_dict().items())
    if form == "nanogpt":
        meta = pickle.loads((tmp_path / "to" / "meta.pkl").read_bytes())
        assert [meta["itos"][i] for i in range(meta["vocab_size"])] == [*meta["stoi"]]


class Hostile:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.place}",)


def test_of_a_pickle_nothing_is_run_and_nothing_else_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ckpt.pt"

    def refused(fact: str) -> None:
        assert main([str(path), str(tmp_path / "init")]) == 2
        assert fact in capsys.readouterr().err
        assert not (tmp_path / "init").exists()

    nanogpt_checkpoint(path, config=Hostile(tmp_path / "ran"))
    refused("more than tensors")
    path.write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    refused("torch 1.6")
    assert not (tmp_path / "ran").exists()
    path.write_bytes(path.read_bytes()[:20])
    refused("complete checkpoint")
    torch.save(
        {"wte.weight": torch.zeros(1).expand(1 << 20, 1 << 20), "h.0.attn.c_attn.weight": torch.zeros(3, 1)}, path
    )
    refused("numbers")
    torch.save({"layer.weight": torch.zeros(3)}, path)
    refused("nanoGPT")
    torch.save({"wte.weight": torch.zeros(3, 4), "h.0.attn.c_attn.weight": torch.zeros(12, 4)}, path)
    refused("heads")
    (tmp_path / "config.json").write_text(json.dumps({"model": {"n_head": 2}}))
    assert main([str(path), str(tmp_path / "init")]) == 0


def test_a_head_of_its_own_is_not_nanogpts(tmp_path: Path, weights: Path) -> None:
    state = json.loads(weights.with_name("000007.state.json").read_text())
    untied = {**MODEL, "tied": False}
    model = GPT(ModelConfig(**untied, vocab_size=64))
    with weights.open("wb") as file:
        write_tensors(file.write, model.state_dict())
    state["recipe"]["model"] = untied
    weights.with_name("000007.state.json").write_text(json.dumps(state))
    with pytest.raises(Refused, match=r"model\.tied"):
        export_other("nanogpt", weights, tmp_path / "to", data=weights.parents[2] / "data")
    export_other("mingpt", weights, tmp_path / "to", data=weights.parents[2] / "data")
    head = read_foreign(tmp_path / "to" / "model.pt")[0]["lm_head.weight"]
    assert torch.equal(head, model.state_dict()["lm_head.weight"][: len(head)])
