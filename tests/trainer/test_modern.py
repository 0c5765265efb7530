"""Tests of the `modern` preset: each part against its own formula."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trainer.tiny_training import Train, events, recipe_record
from trainer.loss import _in_one_go
from trainer.model import GPT
from trainer.modern import ModernAttention, RMSNorm, rms_norm, rotation
from trainer.recipe import ModelConfig, parameters_of

SHAPE = {"layers": 3, "heads": 4, "width": 32, "context": 24, "vocab_size": 128}
MODERN = {"preset": "modern", "bias": False, "tied": False, **SHAPE}


def modern(**keys: object) -> GPT:
    """Return a model with random weights, because weights that start at zero would hide the layers before them."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(**MODERN | keys))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def test_a_score_depends_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    attention = ModernAttention(ModelConfig(**MODERN | {"context": 8}))  # type: ignore[arg-type]
    x = torch.randn(1, 1, 32).expand(1, 8, 32)  # the same token everywhere: only the positions differ
    scores: list[Tensor] = []

    def scored(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        scores.append(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]))
        return v

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", scored)
        attention(x, None, *rotation(8, 8, x.device))
    for distance in range(8):
        diagonal = scores[0][0].diagonal(-distance, dim1=-2, dim2=-1)
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal))
    assert scores[0].abs().max() <= math.sqrt(8) * (1 + 1e-5), "queries and keys have the same length everywhere"
    assert not torch.allclose(scores[0][0, 0, 7, :7], scores[0][0, 0, 7, 1:])


def test_a_rotation_turns_pairs_by_the_papers_angles() -> None:
    cosines, sines = rotation(5, 8, torch.device("cpu"))
    for position in range(5):
        for pair in range(4):
            angle = position * 10_000 ** (-2 * pair / 8)
            assert cosines[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert sines[position, pair].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_channels_that_do_not_rotate_are_the_same_everywhere() -> None:
    """Half of 8 channels rotate: two pairs turn like those of a head with four channels, and two pairs stand still."""
    cosines, sines = rotation(5, 8, torch.device("cpu"), 0.5)
    whole, sines_of_whole = rotation(5, 4, torch.device("cpu"))
    assert torch.equal(cosines[:, :2], whole)
    assert torch.equal(sines[:, :2], sines_of_whole)
    assert torch.equal(cosines[:, 2:], torch.ones(5, 2))
    assert torch.equal(sines[:, 2:], torch.zeros(5, 2))


def test_value_mix_blends_in_the_first_layers_values() -> None:
    model, ids, attended = modern(value_mix=True), torch.randint(128, (2, 8)), list[Tensor]()

    def noted(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        attended.append(v)
        return v

    own: list[Tensor] = []
    for block in model.h:
        block.attn.c_v.register_forward_hook(lambda *given: own.append(given[2]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", noted)
        model.hidden(ids)
    for block, values, raw in zip(model.h, attended, own, strict=True):
        wanted = block.attn.mix[0] * raw + block.attn.mix[1] * own[0]
        torch.testing.assert_close(values.transpose(1, 2).flatten(2), wanted)


def test_no_logit_is_beyond_the_cap_anywhere() -> None:
    model, ids = modern(softcap=0.5), torch.randint(128, (2, 9))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    plain = F.linear(model.hidden(inputs), model.head_weight)
    wanted = 0.5 * torch.tanh(plain / 0.5)
    assert plain.abs().max() > 1.0, "the cap has something to do"
    torch.testing.assert_close(model(inputs, targets), F.cross_entropy(wanted.flatten(0, 1), targets.flatten()))
    with torch.no_grad():
        torch.testing.assert_close(model(inputs, targets), F.cross_entropy(wanted.flatten(0, 1), targets.flatten()))
    last = torch.tensor([7, 3])
    torch.testing.assert_close(model.next_token_logits(inputs, last), wanted[[0, 1], last])


def test_the_mlp_is_relu_squared() -> None:
    mlp, x = modern().h[0].mlp, torch.randn(2, 3, 32)
    wanted = (x @ mlp.c_fc.weight.t()).clamp(min=0) ** 2 @ mlp.c_proj.weight.t()
    torch.testing.assert_close(mlp(x), wanted)


def test_a_fresh_model_guesses_evenly_and_learns_all_weights() -> None:
    torch.manual_seed(0)
    model, ids = GPT(ModelConfig(**MODERN)), torch.randint(128, (4, 25))  # type: ignore[arg-type]
    drawn = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert model(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(math.log(128), abs=1e-6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(4):  # The head moves first, then the layers that write into the residual stream, then the rest.
        optimizer.zero_grad()
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, drawn[name])]


def test_gains_and_biases_begin_neutral_learn_and_are_counted() -> None:
    torch.manual_seed(0)
    plain = GPT(ModelConfig(**MODERN))  # type: ignore[arg-type]
    model = GPT(ModelConfig(**MODERN | {"bias": True, "gains": True}))  # type: ignore[arg-type]
    model.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(128, (4, 24))
    assert torch.equal(model.hidden(ids), plain.hidden(ids))
    assert sum(tensor.numel() for tensor in model.parameters()) == parameters_of(model.config)
    drawn = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(4):
        optimizer.zero_grad()
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, drawn[name])]


def test_every_weight_is_a_matrix_and_counts_are_the_plans() -> None:
    size = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocab_size": 50304}
    with torch.device("meta"):
        model = GPT(ModelConfig(**MODERN | size))  # type: ignore[arg-type]
    assert {parameter.dim() for parameter in model.parameters()} == {2}
    assert sum(tensor.numel() for tensor in model.parameters()) == parameters_of(model.config) == 162_201_600
    assert model.flops_per_token() == 854_654_976


STREAM = MODERN | {"stream": "bf16", "gains": True, "bias": True}


@pytest.mark.parametrize(
    ("keys", "products", "stream"),
    [
        (MODERN, torch.bfloat16, torch.float32),
        (SHAPE, torch.bfloat16, torch.float32),
        (STREAM, torch.bfloat16, torch.bfloat16),
        (STREAM, torch.float16, torch.float32),
        (STREAM, None, torch.float32),
    ],
    ids=["modern", "faithful", "a stream in bf16", "which is not for fp16", "nor for fp32"],
)
def test_norms_and_the_stream_are_fp32_unless_bf16_is_chosen(
    keys: dict[str, object], products: torch.dtype | None, stream: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(**keys))  # type: ignore[arg-type]
    seen: dict[str, set[torch.dtype]] = {"out": set(), "stream": set()}
    for module in model.modules():
        if isinstance(module, RMSNorm | nn.LayerNorm):
            module.register_forward_hook(lambda _, __, out: seen["out"].add(out.dtype))
    for block in model.h:
        block.register_forward_hook(
            lambda _, __, out: seen["stream"].add((out[0] if isinstance(out, tuple) else out).dtype)
        )
    with torch.autocast("cpu", dtype=products, enabled=products is not None):
        loss = model(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    loss.backward()
    assert seen == {"out": {stream}, "stream": {stream}}
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}


def test_a_norm_in_bf16_is_as_exact_as_bf16_can_be() -> None:
    torch.manual_seed(0)
    x = (0.01 * torch.randn(64, 768)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rms_norm(x, torch.full((768,), 2.0), in_bf16=True)
    exact = 2 * x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=0.0, rtol=2**-7)


def test_an_rms_norm_of_bf16_is_as_exact_as_fp32() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 768).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rms_norm(x)
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("keys", [MODERN, SHAPE, STREAM], ids=["modern", "faithful", "a stream in bf16"])
def test_the_blocks_compile_into_one_graph_for_fixed_shapes(keys: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(**keys))  # type: ignore[arg-type]
    ids = torch.randint(128, (2, 24))
    compiled = torch.compile(model.hidden, dynamic=False, fullgraph=True, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(ids), model.hidden(ids))


def test_the_compiler_is_asked_in_the_recipes_mode(tmp_path: Path, train: Train) -> None:
    calls: list[tuple[object, str]] = []

    def compiled(forward: object, *, dynamic: bool, mode: str) -> object:
        calls.append((forward, mode))
        return forward

    keys = {"compile": True, "compile_mode": "max-autotune-no-cudagraphs", "steps": 1, "checkpoint_every": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.compile", compiled)
        patch.setattr("trainer.loss._compiled", lambda: _in_one_go)
        assert train(recipe_record(train=keys, schedule={"warmup_steps": 0}), tmp_path) == 0
    assert [mode for _, mode in calls] == ["max-autotune-no-cudagraphs"] * 2, "each of the two blocks"


def test_a_run_with_muon_and_a_trapezoid_resumes_exactly(tmp_path: Path, train: Train) -> None:
    recipe = recipe_record(
        model={"preset": "modern", "bias": False, "tied": False},
        optim={"kind": "muon", "muon_lr": 0.02},
        schedule={"kind": "trapezoid", "cooldown_fraction": 0.5},
        train={"steps": 8, "checkpoint_every": 4},
    )
    assert train(recipe, tmp_path) == 0
    straight = [event["loss"] for event in events(tmp_path, "step")]
    last = tmp_path / "checkpoints" / "000008.model.safetensors"
    last.write_bytes(last.read_bytes()[:-1])  # The damaged checkpoint is passed over: the run resumes from step 4.
    assert train(recipe, tmp_path) == 0
    again = [event["loss"] for event in events(tmp_path, "step")][8:]
    assert again == straight[4:]
    assert straight[-1] < straight[0] - 0.3


@pytest.mark.parametrize("half", [False, True])
def test_a_product_with_itself_is_the_square_to_the_bit(half: bool) -> None:
    torch.manual_seed(0)
    kind = torch.bfloat16 if half else torch.float32
    given = torch.randn(64, 32).to(kind)
    found = []
    for squared in (lambda x: x * x, torch.square):
        x = given.clone().requires_grad_()
        y = squared(x.relu())
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(kind))
        found.append((y.detach(), x.grad))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
