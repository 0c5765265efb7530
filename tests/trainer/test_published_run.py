"""Tests `modern-124m` against the run that it follows, entry 36 of modded-nanogpt's track 3, step by step.

The reference is written here from the published run, in its own units and without code of trainer/, except for our
initial weights: the embedding is drawn from N(0, 1), losses are summed over a batch, each matrix is updated separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trainer.tiny_training import TEXT, events, train_here
from trainer.checkpoint import read_tensors
from trainer.model import GPT
from trainer.optim import make_optimizer, set_rates
from trainer.recipe import Recipe
from trainer.recipe_file import read_recipe

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "modern-124m.toml"
STEPS, LAYERS, HEADS, WIDTH, CONTEXT, SEQUENCES = 40, 2, 2, 64, 64, 4
VOCABULARY = len({*TEXT})
BATCH, CHANNELS = SEQUENCES * CONTEXT, WIDTH // HEADS
PAIRS = CHANNELS // 4
"""Rotated pairs in a head: half of its channels are rotated, in pairs."""
EMBEDDING_UNIT = 50.0
"""The reference's embedding divided by ours."""
NEAR = 3e-3
SMALL = (
    f"model.layers={LAYERS}", f"model.heads={HEADS}", f"model.width={WIDTH}", f"model.context={CONTEXT}",
    f"model.vocab_size={VOCABULARY}", f"model.rotary_base={1024 ** (PAIRS / (PAIRS - 1))}",
    "data.source=stdlib", "data.tokenizer=char", f"train.steps={STEPS}", f"train.batch_tokens={BATCH}",
    "train.micro_batch=2", "train.compile=false", "train.precision=fp32", "train.log_every=1",
    f"train.checkpoint_every={STEPS}", f"eval.every={STEPS}", f"eval.tokens={4 * BATCH}", "hardware.on_cpu=as_written",
    'sample.prompts=["the "]', "sample.tokens=0",
)  # fmt: skip
"""The keys that a small run changes; all others are the recipe's."""


def small(*words: str) -> Recipe:
    return read_recipe(RECIPE, overrides=[*SMALL, *words])


def begun(recipe: Recipe) -> dict[str, Tensor]:
    """Return our initial weights in the reference's units; q and k swap halves, as its rotation turns the other way."""
    torch.manual_seed(recipe.train.seed)
    w = {name: p.detach().clone() for name, p in GPT(recipe.model, VOCABULARY).named_parameters()}
    w["wte.weight"] *= EMBEDDING_UNIT
    for name in w:
        if ".c_q." in name or ".c_k." in name:
            heads = w[name].unflatten(0, (HEADS, 2, CHANNELS // 2))
            w[name] = heads.flip(1).flatten(0, 2).clone()
    return {name: p.requires_grad_() for name, p in w.items()}


def norm(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)


def turned(x: Tensor) -> Tensor:
    """Return x (batch, time, channels) with pair i turned by time / 1024^(i / (pairs - 1)), the rest unchanged."""
    angles = torch.zeros(x.shape[1], CHANNELS // 2)
    for pair in range(PAIRS):
        angles[:, pair] = torch.arange(x.shape[1]) * 1024 ** (-pair / (PAIRS - 1))
    first, second = x[..., : CHANNELS // 2], x[..., CHANNELS // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def reference_loss(w: dict[str, Tensor], ids: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss of a batch."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]

    later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    x = norm(w["wte.weight"][ids]) * w["ln_0.weight"]
    for layer in range(LAYERS):
        y, heads = norm(x) * w[f"h.{layer}.ln_1.weight"], []
        q, k, v = (linear(y, f"h.{layer}.attn.{name}") for name in ("c_q", "c_k", "c_v"))
        for part in torch.arange(WIDTH).split(CHANNELS):
            scores = 0.12 * turned(norm(q[..., part])) @ turned(norm(k[..., part])).transpose(1, 2)
            heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v[..., part])
        x = x + linear(torch.cat(heads, dim=-1), f"h.{layer}.attn.c_proj")
        y = linear(norm(x) * w[f"h.{layer}.ln_2.weight"], f"h.{layer}.mlp.c_fc")
        x = x + linear(y.clamp(min=0) ** 2, f"h.{layer}.mlp.c_proj")
    logits = linear(norm(x) * w["ln_f.weight"], "lm_head")
    logits = 15 * logits / torch.sqrt(logits**2 + 225)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def made_orthogonal(update: Tensor) -> Tensor:
    """Apply 2 x - 1.5 x³ + 0.5 x⁵ to the singular values twelve times, in bf16."""
    x = update.bfloat16()
    x = x.t() if x.shape[0] > x.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(12):
        gram = x @ x.t()
        x = 2 * x + (-1.5 * gram + 0.5 * gram @ gram) @ x
    return x.t() if update.shape[0] > update.shape[1] else x


def take_step(w: dict[str, Tensor], state: dict[str, Any], number: int) -> None:
    """Update the blocks' matrices with Muon, and the embedding, the head, gains and biases with AdamW."""
    step = number - 1
    eta = 1.0 if step / STEPS < 0.3 else (1 - step / STEPS) / 0.7
    for name, p in w.items():
        gradient, (first, second) = p.grad, state[name]
        if name.startswith("h.") and p.dim() == 2:
            first.lerp_(gradient, 0.05)
            update = made_orthogonal(0.05 * gradient + 0.95 * first).float() * max(1, p.shape[0] / p.shape[1]) ** 0.5
            rate, decay = 0.025, 0.05
        else:
            first.mul_(0.8).add_(0.2 * gradient)
            second.mul_(0.95).add_(0.05 * gradient**2)
            update = first / (1 - 0.8**number) / (torch.sqrt(second / (1 - 0.95**number)) + 1e-10)
            rate, decay = {"wte.weight": 0.7, "lm_head.weight": 0.004}.get(name, 0.015), 0.001
        p.data.mul_(1 - eta * rate * decay).sub_(eta * rate * update)


def in_a_row(folder: Path, name: str, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first `count` batches of a shard."""
    tokens = torch.from_numpy(np.fromfile(folder / name, dtype="<u2", offset=1024).astype(np.int64))
    for start in range(0, count * BATCH, BATCH):
        part = tokens[start : start + BATCH + 1]
        yield part[:-1].view(SEQUENCES, CONTEXT), part[1:].view(SEQUENCES, CONTEXT)


@dataclass(frozen=True)
class Trained:
    """The losses of each step and over the first held-out tokens, per token, and the final norm of the embedding."""

    losses: list[float]
    last: float
    embedding: float


@pytest.fixture(scope="module")
def published(data: Path) -> Trained:
    """Train the reference and return its figures."""
    w = begun(small())
    state = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in w.items()}
    losses = []
    for number, batch in enumerate(in_a_row(data, "train_000001.bin", STEPS), 1):
        loss = reference_loss(w, *batch)
        for p in w.values():
            p.grad = None
        loss.backward()
        take_step(w, state, number)
        losses.append(loss.item() / BATCH)
    with torch.no_grad():
        last = sum(reference_loss(w, *batch).item() for batch in in_a_row(data, "val_000000.bin", 4))
    return Trained(losses, last / BATCH / 4, w["wte.weight"].norm().item())


def ours(data: Path, out: Path, *words: str) -> Trained:
    """Train the recipe with these keys changed, with the trainer itself, and return its figures."""
    assert train_here(small(*words).as_record(), data, out) == 0
    tensors = read_tensors(out / "checkpoints" / f"{STEPS:06}.model.safetensors")
    losses, embedding = [event["loss"] for event in events(out, "step")], EMBEDDING_UNIT * tensors["wte.weight"]
    return Trained(losses, events(out, "eval")[-1]["val_loss"], embedding.norm().item())


def test_the_recipes_losses_are_the_published_runs(tmp_path: Path, data: Path, published: Trained) -> None:
    """The first ten steps agree to 1e-4. Later ones differ more, because bf16 updates are rounded in another order."""
    found = ours(data, tmp_path)
    assert found.losses[:10] == pytest.approx(published.losses[:10], abs=1e-4)
    assert found.losses == pytest.approx(published.losses, abs=NEAR)
    assert found.last == pytest.approx(published.last, abs=NEAR)
    assert found.embedding == pytest.approx(published.embedding, rel=NEAR)
    assert found.losses[-1] < found.losses[0] - 2.0, "a curve that does not move would prove little"


DEPARTURES = {
    "the size of the down-projection's change": "muon_scale=adamw",
    "attention scale": "attention_scale=0",
    "init of q, k, v and fc": "init_gain=1",
    "gains": "gains=false",
    "biases": "model.bias=false",
    "the embedding's decay": "embed_weight_decay=0",
    "gradient clip": "grad_clip=1",
    "Newton-Schulz": "orthogonal=newton-schulz",
    "order of the data": "data.order=permuted",
    "the cap's curve": "softcap_by=tanh",
    "the rotation's base": "rotary_base=10000",
    "half of the channels": "model.rotary=1",
    "the matrices' decay": "muon_weight_decay=0.3",
    "mixed values": "value_mix=true",
    "beta1": "beta1=0.9",
}


@pytest.mark.slow
@pytest.mark.parametrize("word", DEPARTURES.values(), ids=DEPARTURES)
def test_each_departure_would_be_seen(tmp_path: Path, data: Path, published: Trained, word: str) -> None:
    found = ours(data, tmp_path, word)
    apart = max(abs(loss - other) for loss, other in zip(found.losses, published.losses, strict=True))
    assert apart > 2 * NEAR or abs(found.embedding / published.embedding - 1) > 2 * NEAR


def test_each_weight_has_the_published_rate_decay_and_beginning() -> None:
    """Checks one step in the reference's units: the losses of forty steps would not show a gain's decay of 1.5e-5."""
    recipe = read_recipe(RECIPE, overrides=["model.layers=1"])
    torch.manual_seed(0)
    model = GPT(recipe.model, 50257)
    optimizer = make_optimizer(model, recipe.optim)
    assert set_rates(optimizer, recipe, 0) == 0.004
    names = {p: name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name, unit = names[p], EMBEDDING_UNIT if names[p] == "wte.weight" else 1.0
            rate, decay, std = 0.025, 0.05, (0.33 / p.shape[-1]) ** 0.5
            if name == "wte.weight":
                rate, decay, std = 0.7, 0.001, 1.0
            elif name == "lm_head.weight":
                rate, decay = 0.004, 0.001
            elif p.dim() < 2:
                rate, decay = 0.015, 0.001
            assert (group["lr"] * unit, group["lr"] * group["weight_decay"]) == pytest.approx((rate, rate * decay))
            if name.endswith(("c_proj.weight", "lm_head.weight", "bias")):
                assert not p.any(), name
            elif p.dim() < 2:
                assert (p == 1).all(), name
            else:
                assert p.std().item() * unit == pytest.approx(std, rel=1e-2)
    adamw = optimizer.param_groups[-1]
    assert (adamw["betas"], adamw["eps"] * recipe.train.batch_tokens) == ((0.8, 0.95), pytest.approx(1e-10, rel=0.1))
    assert recipe.model.rotary_base == pytest.approx(1024 ** (32 / 31))
    assert (recipe.train.steps, recipe.train.batch_tokens, recipe.train.seed) == (3250, 8 * 64 * 1024, 42)
