"""Tests the whole trainer against a plain loop: the same weights and batches give the same losses."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpurun.data.adopt import adopt
from tests.trainer.tiny_training import TEXT, events, recipe_record, train_here
from trainer.data import Samples, TokenRow
from trainer.model import GPT
from trainer.recipe import ModelConfig
from trainer.shards import open_data

STEPS, WARMUP, PEAK, LOWEST, DECAY, CLIP = 50, 5, 1e-2, 1e-3, 0.1, 1.0
LAYERS, HEADS, WIDTH, CONTEXT, SEQUENCES = 2, 2, 16, 16, 8


def plain_gpt2(w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Return the logits of GPT-2 written out in full, with whole attention matrices (Radford et al. 2019)."""

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]

    time = ids.shape[1]
    x = w["wte.weight"][ids] + w["wpe.weight"][:time]
    later = torch.ones(time, time, dtype=torch.bool).triu(1)
    for layer in range(LAYERS):
        heads = []
        q, k, v = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").split(WIDTH, dim=-1)
        for part in torch.arange(WIDTH).split(WIDTH // HEADS):
            scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(WIDTH // HEADS)
            heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v[..., part])
        x = x + linear(torch.cat(heads, dim=-1), f"h.{layer}.attn.c_proj")
        y = linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].t()


def plain_adamw(w: dict[str, Tensor], moments: dict[str, tuple[Tensor, Tensor]], rate: float, number: int) -> None:
    """Clip the gradient's norm to CLIP, then update the weights (Loshchilov and Hutter 2019, algorithm 2)."""
    norm = torch.sqrt(sum(p.grad.square().sum() for p in w.values()))
    for name, p in w.items():
        gradient = p.grad * min(1.0, CLIP / norm.item())
        first, second = moments[name]
        first.mul_(0.9).add_(0.1 * gradient)
        second.mul_(0.95).add_(0.05 * gradient**2)
        step = first / (1 - 0.9**number) / (torch.sqrt(second / (1 - 0.95**number)) + 1e-8)
        p.data -= rate * (step + (DECAY * p.data if p.dim() == 2 else 0))


def rate_of(number: int) -> float:
    if number <= WARMUP:
        return PEAK * number / WARMUP
    return LOWEST + (PEAK - LOWEST) * (1 + math.cos(math.pi * (number - 1 - WARMUP) / (STEPS - WARMUP))) / 2


def reference_losses(data_folder: Path, vocab_size: int) -> list[float]:
    data = open_data(data_folder, "char", ["the "])
    samples = Samples(TokenRow(data.train, 1), CONTEXT, 42, "train")
    torch.manual_seed(42)
    shape = ModelConfig(layers=LAYERS, heads=HEADS, width=WIDTH, context=CONTEXT, vocab_size=vocab_size)
    w = {name: p.detach().clone().requires_grad_() for name, p in GPT(shape).named_parameters()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in w.items()}
    losses = []
    for number in range(1, STEPS + 1):
        ids, targets = (torch.as_tensor(part) for part in samples.read((number - 1) * SEQUENCES, SEQUENCES))
        for p in w.values():
            p.grad = None
        loss = F.cross_entropy(plain_gpt2(w, ids).flatten(0, 1)[:, : data.tokenizer.vocab_size], targets.flatten())
        loss.backward()
        plain_adamw(w, moments, rate_of(number), number)
        losses.append(loss.item())
    return losses


def as_nanogpt_has_it(folder: Path) -> Path:
    """Write the text as nanoGPT's data/shakespeare_char/prepare.py does, adopt it, and return the adopted folder."""
    theirs, ours, alphabet = folder / "theirs", folder / "ours", sorted({*TEXT})
    theirs.mkdir()
    ids, held_out = np.array([alphabet.index(letter) for letter in TEXT], dtype=np.uint16), len(TEXT) // 10
    ids[:-held_out].tofile(theirs / "train.bin")
    ids[-held_out:].tofile(theirs / "val.bin")
    numbers = {letter: number for number, letter in enumerate(alphabet)}
    meta = {"vocab_size": len(alphabet), "itos": dict(enumerate(alphabet)), "stoi": numbers}
    (theirs / "meta.pkl").write_bytes(pickle.dumps(meta))
    adopt(theirs, "char", ours, print)
    (ours / "prompts.json").write_text(json.dumps([{"text": "the ", "ids": [numbers[letter] for letter in "the "]}]))
    return ours


@pytest.mark.parametrize("made", ["by gpurun", "by nanoGPT"])
def test_fifty_steps_have_the_losses_of_a_plain_loop(tmp_path: Path, data: Path, made: str) -> None:
    folder = data if made == "by gpurun" else as_nanogpt_has_it(tmp_path)
    recipe = recipe_record(
        model={"layers": LAYERS, "heads": HEADS, "width": WIDTH, "context": CONTEXT, "dropout": 0.0},
        optim={"lr": PEAK, "weight_decay": DECAY, "grad_clip": CLIP},
        schedule={"warmup_steps": WARMUP, "min_lr": LOWEST},
        # Four portions a step, which must not change the losses.
        train={"steps": STEPS, "batch_tokens": SEQUENCES * CONTEXT, "micro_batch": 2, "checkpoint_every": STEPS},
        eval={"every": STEPS},
    )
    assert train_here(recipe, folder, tmp_path / "out") == 0
    losses = [event["loss"] for event in events(tmp_path / "out", "step")]
    assert losses == pytest.approx(reference_losses(folder, 64), abs=1e-3)
    assert losses[-1] < losses[0] - 0.5, "a curve that does not move would prove little"
