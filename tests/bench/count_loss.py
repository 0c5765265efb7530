"""Counts the kernel launches and moved bytes of a micro-batch's loss: `python tests/bench/count_loss.py`.

64 x 1024 tokens of GPT-2 124M in bf16, forward and backward, without a GPU. Each eager operation on tensors without
data counts as a launch that moves the bytes of its arguments and results. For compiled code torch's own compiler
reports each kernel's bytes (kernels for a CPU; those for a GPU are split alike or into fewer). "Whole logits" are the
usual linear layer and cross-entropy, compiled together. Prints a Markdown table.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import loss

TOKENS, WIDTH, ROWS, VOCAB = 64 * 1024, 768, 50304, 50257
BF16 = torch.bfloat16


@dataclass
class Traffic:
    """A number of kernel launches and the bytes that they read and write."""

    launches: int = 0
    size: int = 0

    def add(self, size: int, launches: int = 1) -> None:
        self.launches += launches
        self.size += size


class _Counted(TorchDispatchMode):
    """A dispatch mode that adds every eager operation's launch and bytes to `seen`."""

    def __init__(self, seen: Traffic) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not func.is_view and not any(word in str(func) for word in ("empty", "detach", "prim.", "_local_scalar")):
            if "gather" in str(func) or "scatter" in str(func):  # It touches one element of each row.
                self.seen.add(3 * _size(args[2]))
            else:
                # A tensor changed in place is read and written: it counts as an argument and again as the result.
                self.seen.add(sum(map(_size, [*args, *kwargs.values(), made])))
        return made


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.itemsize
    return sum(map(_size, value)) if isinstance(value, tuple | list) else 0


def counted_by_the_compiler(act: Callable[[], Any]) -> Traffic:
    """Return the traffic of the kernels that torch.compile makes while `act` runs."""
    from torch._inductor import compile_fx, config, metrics

    torch._dynamo.reset()
    metrics.reset()
    logger = compile_fx.inductor_metrics_log  # The compiler counts bytes only for this log.
    before, logger.propagate = logger.level, False
    logger.setLevel(logging.INFO)
    try:
        with config.patch(force_disable_caches=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
            act()
    finally:
        logger.setLevel(before)
    return Traffic(len(metrics.nodes_num_elem), metrics.num_bytes_accessed)


def of_our_loss(*, compiled: bool, tokens: int = TOKENS) -> Traffic:
    """Return the traffic of trainer/loss.py as it would run on a GPU."""
    seen, known = Traffic(), dict[int, Traffic]()

    def kernel(logits: Tensor, *rest: Any) -> Tensor:
        found = known[len(logits)]
        seen.add(found.size, found.launches)
        return torch.empty(())

    def add_product(sums: Tensor, grad: Tensor, part: Tensor) -> None:
        seen.add(_size((sums, grad, part, sums)))  # On a GPU the matrix product also adds.

    if compiled:
        chunk = min(tokens, loss._chunk_tokens(ROWS * BF16.itemsize, BF16, loss.CARD_BYTES))
        assert tokens % chunk == 0
        known[chunk] = counted_by_the_compiler(lambda: _one_chunk(chunk))
    as_on_a_card = {"_compiled": lambda: kernel, "_add_product": add_product}
    as_on_a_card |= {"CHUNK_BYTES": loss.CARD_BYTES if compiled else loss.EAGER_BYTES}
    with mock.patch.multiple(loss, **as_on_a_card), FakeTensorMode():
        hidden, weight = (torch.empty(count, WIDTH, requires_grad=True) for count in (tokens, ROWS))
        targets = torch.empty(tokens, dtype=torch.int64)
        with _Counted(seen), torch.autocast("cpu", dtype=BF16):
            loss.chunked_cross_entropy(hidden, weight, targets, vocab_size=VOCAB, compiled=compiled).backward()
    return seen


@torch.no_grad()
def _one_chunk(tokens: int) -> None:
    """Put one chunk of zeros through the compiled kernel."""
    logits, targets = torch.zeros(tokens, ROWS, dtype=BF16), torch.zeros(tokens, dtype=torch.int64)
    loss._compiled()(logits, targets, targets == 0, torch.ones(tokens, 1), VOCAB, 0.0, 0.0, "tanh")


def of_whole_logits() -> Traffic:
    """Return the traffic of nanoGPT's way, which is too large to run here: extrapolated from 512 and 1,024 tokens."""

    def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), targets)

    def of(tokens: int) -> Traffic:
        return counted_by_the_compiler(lambda: act(tokens))

    def act(tokens: int) -> None:
        hidden, weight = torch.zeros(tokens, WIDTH, requires_grad=True), torch.zeros(ROWS, WIDTH, requires_grad=True)
        with torch.autocast("cpu", dtype=BF16):
            found = torch.compile(whole, dynamic=False)(hidden, weight, torch.zeros(tokens, dtype=torch.int64))
        found.backward()

    some, twice = of(512), of(1024)
    each = twice.size - some.size
    return Traffic(some.launches, some.size + each * (TOKENS - 512) // 512)


def rows() -> Iterator[tuple[str, Traffic]]:
    yield "ours, step by step", of_our_loss(compiled=False)
    yield "ours, compiled", of_our_loss(compiled=True)
    yield "whole logits, compiled", of_whole_logits()


if __name__ == "__main__":
    print("| the loss of 64 x 1024 tokens, V = 50304, bf16 | launches | read and written |\n| --- | --- | --- |")
    for what, found in rows():
        print(f"| {what} | {found.launches:,} | {found.size / 1e9:.1f} GB |", flush=True)
