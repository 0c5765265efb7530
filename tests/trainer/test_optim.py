"""Tests of the schedule, the batch's division, the optimisers and weight decay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from muon_twice import muon_in_one_of_two
from torch.utils.flop_counter import FlopCounterMode

from gpurun.jobs.training.estimate import muon_flops
from gpurun.jobs.training.recipe import load_recipe, resolve
from tests.bench.count_muon import launches
from tests.trainer.tiny_training import recipe_record, train_here
from trainer.checkpoint import read_tensors
from trainer.data import BatchPlan, plan_batch
from trainer.distributed import Processes
from trainer.errors import Refused
from trainer.model import GPT
from trainer.optim import (
    POLYNOMIALS,
    Muon,
    block_matrices,
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    orthogonalised,
    set_learning_rate,
    set_rates,
)
from trainer.recipe import OptimConfig, parse_recipe
from trainer.translation.model import Translator


def test_cosine_warms_up_to_lr_and_falls_to_min_lr() -> None:
    recipe = parse_recipe(
        recipe_record(
            optim={"lr": 6e-4}, train={"steps": 110}, schedule={"kind": "cosine", "warmup_steps": 10, "min_lr": 6e-5}
        )
    )
    assert learning_rate(recipe, 0) == pytest.approx(6e-5)
    assert learning_rate(recipe, 9) == pytest.approx(6e-4)
    assert learning_rate(recipe, 10) == pytest.approx(6e-4)
    assert learning_rate(recipe, 60) == pytest.approx((6e-4 + 6e-5) / 2)
    assert learning_rate(recipe, 35) == pytest.approx(6e-5 + 0.5 * (1 + math.cos(math.pi / 4)) * 5.4e-4)
    assert learning_rate(recipe, 110) == pytest.approx(6e-5)
    rates = [learning_rate(recipe, step) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)


def test_constant_warms_up_and_stays() -> None:
    recipe = parse_recipe(recipe_record(schedule={"kind": "constant", "warmup_steps": 4, "min_lr": 0.0}))
    assert [learning_rate(recipe, s) for s in (0, 3, 4, 19)] == pytest.approx([2.5e-3, 1e-2, 1e-2, 1e-2])
    assert learning_rate(parse_recipe(recipe_record(schedule={"warmup_steps": 20})), 20) == 1e-3


def test_a_trapezoid_rises_stays_and_falls_in_a_straight_line() -> None:
    schedule = {"kind": "trapezoid", "warmup_steps": 10, "min_lr": 1e-4, "cooldown_fraction": 0.4}
    recipe = parse_recipe(recipe_record(optim={"lr": 1e-3}, train={"steps": 100}, schedule=schedule))
    assert learning_rate(recipe, 0) == pytest.approx(1e-4)
    assert {learning_rate(recipe, step) for step in range(9, 61)} == {1e-3}
    assert learning_rate(recipe, 80) == pytest.approx((1e-3 + 1e-4) / 2)
    assert learning_rate(recipe, 99) == pytest.approx(1e-4 + 9e-4 / 40)
    assert learning_rate(recipe, 100) == pytest.approx(1e-4)


def test_noam_is_the_papers_formula() -> None:
    schedule = {"kind": "noam", "warmup_steps": 4000, "min_lr": 0.0}
    recipe = parse_recipe(
        recipe_record(model={"width": 512, "heads": 8}, optim={"lr": 1.0}, train={"steps": 9000}, schedule=schedule)
    )
    for number in (1, 10, 3999, 4000, 4001, 9000):  # the paper counts from 1
        wanted = 512**-0.5 * min(number**-0.5, number * 4000**-1.5)
        assert learning_rate(recipe, number - 1) == pytest.approx(wanted, rel=1e-12)
    rates = [learning_rate(recipe, step) for step in range(9000)]
    assert max(range(9000), key=rates.__getitem__) == 3999
    assert rates[3999] == pytest.approx(6.99e-4, rel=1e-3), "the figure that the paper's base model peaks at"


@pytest.mark.parametrize(
    ("batch_tokens", "micro_batch", "processes", "plan"),
    [
        (128, 2, 1, BatchPlan(8, 2, 4)),
        (128, 2, 2, BatchPlan(8, 2, 2)),
        (128, 64, 1, BatchPlan(8, 8, 1)),
        (192, 5, 2, BatchPlan(12, 3, 2)),
        (112, 4, 1, BatchPlan(7, 1, 7)),
    ],
)
def test_the_largest_whole_micro_batch_is_taken(batch_tokens: int, micro_batch: int, processes: int, plan: BatchPlan):
    recipe = parse_recipe(recipe_record(train={"batch_tokens": batch_tokens, "micro_batch": micro_batch}))
    assert plan_batch(recipe, processes) == plan


def test_an_impossible_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(Refused, match=r"batch_tokens 100 .* model\.context 16"):
        plan_batch(parse_recipe(recipe_record(train={"batch_tokens": 100})), 1)
    with pytest.raises(Refused, match=r"8 sequences .* 3 processes"):
        plan_batch(parse_recipe(recipe_record()), 3)


def test_matrices_decay_and_vectors_do_not() -> None:
    recipe = parse_recipe(recipe_record(model={"vocab_size": 64}))
    model = GPT(recipe.model)
    optimizer = make_optimizer(model, recipe.optim)
    decayed, kept = (group["params"] for group in optimizer.param_groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert {p.dim() for p in decayed} == {2}
    assert {p.dim() for p in kept} == {1}
    assert len(decayed) + len(kept) == len(list(model.parameters()))


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
PRESETS = {"faithful": {}, "modern": {"preset": "modern", "bias": False, "tied": False}}


@pytest.mark.parametrize("preset", PRESETS)
def test_muon_has_the_blocks_matrices_and_adamw_the_rest(preset: str) -> None:
    keys = {"kind": "muon", "muon_lr": 0.02, "lr": 0.005}
    recipe = parse_recipe(recipe_record(model={"vocab_size": 64, **PRESETS[preset]}, optim=keys))
    model = GPT(recipe.model)
    optimizer = make_optimizer(model, recipe.optim)
    names = {parameter: name for name, parameter in model.named_parameters()}
    muon, decayed, *others = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    kept = [name for group in others for name in group]
    assert all(name.startswith("h.") and name.endswith("weight") for name in muon)
    assert {names[p] for p in model.h.parameters() if p.dim() == 2} == set(muon)
    assert all(not name.startswith("h.") for name in decayed)
    assert sorted([*muon, *decayed, *kept]) == sorted(names.values())
    assert bool(kept) == (preset == "faithful")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0][: 2 + len(others)]
    set_learning_rate(optimizer, 0.001)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.004, 0.001, 0.001][: 2 + len(others)])


def test_embedding_and_head_have_own_rates_and_muon_a_decay() -> None:
    rates = {"kind": "muon", "lr": 0.01, "embed_lr": 0.05, "head_lr": 0.002, "muon_weight_decay": 0.3}
    recipe = parse_recipe(recipe_record(model={"vocab_size": 64, **PRESETS["modern"]}, optim=rates))
    model = GPT(recipe.model)
    optimizer = make_optimizer(model, recipe.optim)
    set_learning_rate(optimizer, 0.001)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        names[p]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    assert found.pop("wte.weight") == pytest.approx((0.005, 0.1))
    assert found.pop("lm_head.weight") == pytest.approx((0.0002, 0.1))
    assert set(found.values()) == {(0.001, 0.3)}


def test_gains_biases_and_embedding_have_their_own_decay() -> None:
    rates = {"lr": 0.01, "gain_lr": 0.03, "gain_weight_decay": 0.2, "embed_weight_decay": 0.5}
    recipe = parse_recipe(recipe_record(model={"vocab_size": 64}, optim=rates))
    model = GPT(recipe.model)
    optimizer = make_optimizer(model, recipe.optim)
    assert set_rates(optimizer, recipe, 1) == 0.01
    for group in optimizer.param_groups:
        wanted = {1: (0.03, 0.2), 2: (0.01, 0.1)}[group["params"][0].dim()]
        wanted = (0.01, 0.5) if group["params"][0] is model.wte.weight else wanted
        assert {p.dim() for p in group["params"]} == {group["params"][0].dim()}
        assert (group["lr"], group["weight_decay"]) == pytest.approx(wanted)


def test_a_run_says_which_weights_decay(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for decay, said in ((0.0, "not decayed: 18 tensors"), (0.1, "not decayed: 0 tensors")):
        keys = {"train": {"steps": 1, "checkpoint_every": 1}, "optim": {"gain_weight_decay": decay}}
        recipe = recipe_record(**keys, schedule={"warmup_steps": 0}, sample={"tokens": 0})
        assert train_here(recipe, data, tmp_path / said) == 0
        assert said in capsys.readouterr().out


def test_muons_momentum_rises_linearly_by_the_step_alone() -> None:
    optim = {"kind": "muon", "muon_momentum_warmup": 4}
    recipe = parse_recipe(recipe_record(model={"vocab_size": 64}, optim=optim))
    optimizer = make_optimizer(GPT(recipe.model), recipe.optim)

    def momentum(step: int) -> float:
        set_rates(optimizer, recipe, step)
        found: float = optimizer.param_groups[0]["momentum"]
        return found

    wanted = [0.85, 0.875, 0.9, 0.925, 0.95, 0.95]
    assert [momentum(step) for step in range(6)] == pytest.approx(wanted)
    assert momentum(2) == pytest.approx(0.9), "a resumed run has what a straight one had"


def test_cautious_decay_shrinks_only_what_the_step_shrinks() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(32, 64), torch.randn(32, 64)
    moved = {}
    for cautious, decay in ((False, 0.0), (False, 0.5), (True, 0.5)):
        layer = torch.nn.Linear(64, 32, bias=False)
        layer.weight.data.copy_(start)
        layer.weight.grad = gradient.clone()
        config = OptimConfig(kind="muon", lr=0.1, weight_decay=decay, cautious=cautious)
        make_optimizer(layer, config).step()
        moved[cautious, decay] = layer.weight.detach()
    is_shrunk = (moved[False, 0.0] - start) * start < 0
    assert 0.4 < is_shrunk.float().mean() < 0.6
    torch.testing.assert_close(moved[True, 0.5], torch.where(is_shrunk, moved[False, 0.5], moved[False, 0.0]))


@pytest.mark.parametrize(
    ("name", "within"), [("newton-schulz", 0.5), ("polar-express", 0.15), ("newton-schulz-12", 0.03)]
)
def test_the_iterations_bring_small_singular_values_near_one(name: str, within: float) -> None:
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(64, 64))[0], torch.linalg.qr(torch.randn(64, 64))[0]
    values = torch.logspace(0, -2, 64)
    made = orthogonalised(((left * values) @ right.t()).bfloat16()[None], POLYNOMIALS[name])[0].float()
    found = (left.t() @ made @ right).diagonal()
    assert (found - 1).abs().max() < within


def test_muon_moves_a_matrix_equally_and_as_far_as_adamw() -> None:
    config = parse_recipe(recipe_record(optim={"kind": "muon", "lr": 0.1, "weight_decay": 0.0})).optim
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 32, bias=False)
    optimizer = make_optimizer(layer, config)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(32, 64) * torch.logspace(0, -2, 32)[:, None]  # some directions are much steeper
    optimizer.step()
    singular = torch.linalg.svdvals(before - layer.weight.detach()) / (0.1 * 0.2 * math.sqrt(64))
    assert singular.min() > 0.5
    assert singular.max() < 1.5


@pytest.mark.parametrize(("rows", "columns", "size"), [(64, 16, 2.0), (32, 32, 1.0), (16, 64, 1.0)])
def test_by_aspect_a_step_grows_with_rows_over_columns(rows: int, columns: int, size: float) -> None:
    keys = {"kind": "muon", "lr": 0.1, "weight_decay": 0.0, "muon_scale": "aspect", "orthogonal": "newton-schulz-12"}
    torch.manual_seed(0)
    layer = torch.nn.Linear(columns, rows, bias=False)
    optimizer = make_optimizer(layer, parse_recipe(recipe_record(optim=keys)).optim)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(rows, columns)
    optimizer.step()
    singular = torch.linalg.svdvals(before - layer.weight.detach()) / 0.1
    torch.testing.assert_close(singular, torch.full_like(singular, size), rtol=3e-2, atol=0.0)


@needs_muon
@pytest.mark.parametrize("preset", PRESETS)
def test_muon_comes_to_the_bits_that_torchs_own_comes_to(preset: str) -> None:
    recipe = parse_recipe(recipe_record(model={"vocab_size": 64, "width": 64, "dropout": 0.0, **PRESETS[preset]}))
    torch.manual_seed(0)
    ours, theirs = GPT(recipe.model), GPT(recipe.model)
    theirs.load_state_dict(ours.state_dict())
    config = OptimConfig(kind="muon", lr=0.01)
    stacked = Muon(block_matrices(ours), config, Processes())
    plain = torch.optim.Muon(block_matrices(theirs), lr=0.01, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        ids = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(step))
        for model, optimizer in ((ours, stacked), (theirs, plain)):
            model(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
            model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    for our, their in zip(block_matrices(ours), block_matrices(theirs), strict=True):
        assert torch.equal(stacked.state[our]["momentum_buffer"], plain.state[their]["momentum_buffer"])


def test_a_step_of_muon_takes_few_launches() -> None:
    assert launches("124M", "ours") <= 250


@pytest.mark.parametrize("iterations", POLYNOMIALS)
@pytest.mark.parametrize("preset", ["faithful", "modern", "encoder-decoder"])
def test_the_plan_charges_what_a_step_of_muon_multiplies(preset: str, iterations: str) -> None:
    words = ("optim.kind=muon", f"orthogonal={iterations}", "model.layers=3", "model.width=96", "heads=3")
    recipe = resolve(load_recipe("gpt2-124m"), "full", words)
    config = dataclasses.replace(recipe.tables.model, preset=preset, vocab_size=64, bias=False, tied=preset != "modern")
    recipe = dataclasses.replace(recipe, tables=dataclasses.replace(recipe.tables, model=config))
    with torch.device("meta"):
        model = Translator(config, pad_id=0) if preset == "encoder-decoder" else GPT(config)
    muon = Muon(block_matrices(model), recipe.tables.optim, Processes())
    for matrix in muon.param_groups[0]["params"]:
        matrix.grad = torch.empty_like(matrix)
    with FlopCounterMode(display=False) as counted:
        muon.step()
    assert counted.get_total_flops() == muon_flops(recipe)


@pytest.mark.slow
def test_muon_leaves_equal_weights_in_all_processes(tmp_path: Path) -> None:
    record = recipe_record(model={"vocab_size": 64, "dropout": 0.0}, optim={"kind": "muon"})
    torch.multiprocessing.spawn(muon_in_one_of_two, (tmp_path, record), nprocs=2)
    whole, also, parts = (read_tensors(tmp_path / name) for name in ("whole-0", "whole-1", "parts-0"))
    assert all(torch.equal(whole[name], also[name]) for name in whole)
    torch.manual_seed(0)
    drawn = GPT(parse_recipe(recipe_record(model={"vocab_size": 64})).model).state_dict()
    assert all(torch.equal(whole[name], parts[name]) for name in whole), "orthogonal as a whole, and not each part"
    assert not torch.equal(whole["h.0.mlp.c_fc.weight"], drawn["h.0.mlp.c_fc.weight"])


OTHERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adafactor": torch.optim.Adafactor,  # Its moments have other shapes than their weights.
    "radam": partial(torch.optim.RAdam, lr=1e-3),
}


@pytest.mark.parametrize("kind", ["adamw", "muon", *OTHERS])
def test_any_optimiser_resumes_exactly_from_its_tensors(kind: str) -> None:
    own = {} if kind in OTHERS else {"kind": kind}
    recipe = parse_recipe(recipe_record(model={"vocab_size": 64, "dropout": 0.0}, optim=own))
    ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))

    def steps(model: GPT, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            model(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    straight = GPT(recipe.model)
    make = (
        (lambda model: OTHERS[kind](model.parameters()))
        if kind in OTHERS
        else partial(make_optimizer, config=recipe.optim)
    )
    first = make(straight)
    steps(straight, first, 2)
    other = GPT(recipe.model)
    other.load_state_dict(straight.state_dict())
    second = make(other)
    load_optimizer_tensors(other, second, {k: v.clone() for k, v in optimizer_tensors(straight, first).items()})
    steps(straight, first, 2)
    steps(other, second, 2)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_a_moment_of_another_shape_is_refused_by_name(key: str) -> None:
    recipe = parse_recipe(recipe_record(model={"vocab_size": 64}))
    model = GPT(recipe.model)
    optimizer = make_optimizer(model, recipe.optim)
    ids = torch.randint(64, (2, 17))
    model(ids[:, :-1], ids[:, 1:]).backward()
    optimizer.step()
    tensors = optimizer_tensors(model, optimizer) | {f"wpe.weight.{key}": torch.zeros(3, 16)}
    with pytest.raises(ValueError, match=rf"wpe\.weight\.{key}.* \[3, 16\]"):
        load_optimizer_tensors(model, optimizer, tensors)
