"""Traces the memory that a recipe's step needs on one GPU, without a GPU: `python -m trainer.traced_memory`.

torch's MemTracker follows the real step on fake tensors, which have a shape but no content. They claim to be on the
CPU. Where a GPU behaves differently, its behaviour is used: the fused AdamW, and flash attention, which on a CPU has no
dropout. With `--recipe FILE --micro-batch 1 --micro-batch 16` it prints one JSON line: the model's parameter count, and
the most bytes of tensors at each micro-batch, for a step in two portions. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

from trainer.data import plan_batch
from trainer.distributed import Device, ParallelStrategy, Processes, SingleProcess
from trainer.errors import Refused
from trainer.evaluate import TextTask
from trainer.events import Reporter
from trainer.optim import LossScale, SpikeGuard, make_optimizer
from trainer.recipe import ModelConfig, Recipe
from trainer.recipe_file import add_recipe_words, read_recipe
from trainer.run import RunIO, Setup, State, TrainingRun
from trainer.train import take_step
from trainer.translation.task import TranslationTask

__all__ = ["main", "traced_step"]


def traced_step(
    recipe: Recipe,
    vocab_size: int,
    precision: str,
    *,
    processes: Processes | None = None,
    share: Callable[[nn.Module], ParallelStrategy] = SingleProcess,
    on_card: bool = True,
) -> tuple[int, int]:
    """Return the model's parameter count, and the most bytes of tensors in one process during a step of the recipe.

    `share` returns the strategy by which `processes` share the model; no data is sent between them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_with_nothing_in_it())
        if on_card:
            stack.enter_context(_as_on_a_card())
        setup, state, io = _run(recipe, vocab_size, precision, processes or Processes(), share)
        # The first step creates the optimiser's state, and tries the layouts of parts on whole tensors.
        take_step(setup, state, io)
        state.step += 1
        tracker = MemTracker()
        tracker.track_external(setup.model, setup.optimizer)
        begin = setup.parallel.before_micro_step
        # The tracker treats a module's second forward as an error, unless a new pass is announced.
        setup.parallel.before_micro_step = lambda last: (tracker.reset_mod_stats(), begin(last))  # type: ignore
        with tracker:
            take_step(setup, state, io)
        peaks = tracker.get_tracker_snapshot("peak")
    return sum(p.numel() for p in setup.model.parameters()), int(peaks[torch.device("cpu")]["Total"])


class _Tokens:
    """A stand-in for a corpus, whose ids are all zero."""

    def __init__(self, config: ModelConfig) -> None:
        self._config, self.train_samples = config, self

    def read(self, first: int, count: int) -> tuple[Tensor, ...]:
        """Return inputs and targets (count, context), int64; for sentence pairs, source, target, labels and weight."""
        in_pairs = self._config.preset == "encoder-decoder"
        ids = [torch.zeros(count, self._config.context, dtype=torch.int64) for _ in range(2 + in_pairs)]
        return (*ids, torch.ones(())) if in_pairs else tuple(ids)


def _run(
    recipe: Recipe,
    vocab_size: int,
    precision: str,
    processes: Processes,
    share: Callable[[nn.Module], ParallelStrategy],
) -> TrainingRun:
    data = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=vocab_size))
    opened: Any = SimpleNamespace(data=data, special=SimpleNamespace(pad_id=0))
    task: Any = TranslationTask if recipe.model.preset == "encoder-decoder" else TextTask
    model, tokens, nowhere = task.build_model(opened, recipe), cast("Any", _Tokens(recipe.model)), Path()
    setup = Setup(
        recipe=recipe, data=nowhere, out=nowhere, processes=processes, model=model, parallel=share(model),
        device=Device(torch.device("cpu"), precision, None), task=tokens, planned={},
        optimizer=make_optimizer(model, recipe.optim, processes),
    )  # fmt: skip
    state = State()
    state.plan = plan_batch(recipe, processes.count)
    state.scale, state.spikes = LossScale(precision == "fp16"), SpikeGuard(recipe.train.spike_z)
    return TrainingRun(setup, state, RunIO(Reporter(nowhere, is_first=False), None, threading.Event()))


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of the GPU's kernel: flash attention or, with a mask, memory-efficient attention."""
    kernels = torch.ops.aten
    if attn_mask is None:
        return kernels._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    # torch first converts a boolean mask to numbers, in the mask's own size; every head reads the same numbers.
    bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    bias = bias.expand(*q.shape[:3], k.shape[2])
    return kernels._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, False)[0]


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return the result of the GPU's kernel, which keeps one byte per value."""
    return torch.native_dropout(x, p, training)[0] if p and training else x


@contextlib.contextmanager
def _as_on_a_card() -> Iterator[None]:
    with (
        mock.patch("torch.nn.functional.scaled_dot_product_attention", _fused),
        mock.patch("torch.nn.functional.dropout", _dropout),
    ):
        yield


class _Arrived:
    def wait(self) -> None:
        """Return immediately: nothing is sent."""


@contextlib.contextmanager
def _with_nothing_in_it() -> Iterator[None]:
    """Replace the functions that need the content of fake tensors: those that read numbers and those that send them."""
    from torch._subclasses.fake_tensor import FakeTensor

    with (
        mock.patch.object(FakeTensor, "tolist", lambda tensor: [0.0] * tensor.numel()),
        mock.patch("torch.distributed.all_reduce", return_value=_Arrived()),
    ):
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the traced figures as one JSON line; return 0, or 2 if the recipe is refused."""
    parser = argparse.ArgumentParser(prog="python -m trainer.traced_memory", description="Trace a step's memory.")
    add_recipe_words(parser)
    parser.add_argument("--vocab-size", type=int, default=0, help="the tokeniser's, for a model that leaves it open")
    parser.add_argument("--micro-batch", type=int, action="append", required=True, metavar="N", help="repeatable")
    given = parser.parse_args(arguments)
    try:
        recipe = read_recipe(given.recipe, overrides=given.overrides, rehearse=given.rehearse)
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return refusal.exit_code
    precision = "fp32" if recipe.train.precision == "fp32" else "bf16"
    traced: dict[str, Any] = {"parameters": 0, "peak_bytes": {}}
    for size in given.micro_batch:
        train = replace(
            recipe.train, micro_batch=size, batch_tokens=2 * size * recipe.model.context, spike="off", compile=False
        )
        cut = replace(recipe, train=train)
        traced["parameters"], traced["peak_bytes"][str(size)] = traced_step(cut, given.vocab_size, precision)
    print(json.dumps(traced), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
