"""The schedule, the arithmetic of a batch, and which weights decay."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import recipe_record

from trainer.config import parse_recipe
from trainer.errors import Refused
from trainer.model import GPT
from trainer.optim import (
    BatchPlan,
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    plan_batch,
)


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
    recipe = parse_recipe(recipe_record(schedule={"kind": "constant", "warmup_steps": 4}))
    assert [learning_rate(recipe, s) for s in (0, 3, 4, 19)] == pytest.approx([2.5e-3, 1e-2, 1e-2, 1e-2])
    assert learning_rate(parse_recipe(recipe_record(schedule={"warmup_steps": 20})), 20) == 1e-3


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
    optimizer = make_optimizer(model, recipe.optim, torch.device("cpu"))
    decayed, kept = (group["params"] for group in optimizer.param_groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert {p.dim() for p in decayed} == {2}
    assert {p.dim() for p in kept} == {1}
    assert len(decayed) + len(kept) == len(list(model.parameters()))


def test_the_optimiser_goes_on_from_its_tensors_as_if_it_had_never_stopped() -> None:
    recipe = parse_recipe(recipe_record(model={"vocab_size": 64, "dropout": 0.0}))
    ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))

    def steps(model: GPT, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            model(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    straight = GPT(recipe.model)
    first = make_optimizer(straight, recipe.optim, torch.device("cpu"))
    steps(straight, first, 2)
    other = GPT(recipe.model)
    other.load_state_dict(straight.state_dict())
    second = make_optimizer(other, recipe.optim, torch.device("cpu"))
    load_optimizer_tensors(other, second, {k: v.clone() for k, v in optimizer_tensors(straight, first).items()})
    steps(straight, first, 2)
    steps(other, second, 2)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), other.parameters(), strict=True))
