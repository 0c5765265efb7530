"""Measures what needs a GPU: speed, memory, MFU, the first steps, and where a step's time goes. `make bench-gpu`.

    python tests/bench/bench_gpu.py [--rounds 5] [--minutes 9] [--try] [--rows mfu,loss,124m,memory,start,10m,slow]

The comparisons (`10m`, `124m`, `slow`) work as in `bench_trainer.py`, but in bf16: all start from the same weights,
take blocks of steps in turn, and first their losses on 20 equal batches must agree. A block is timed as a whole,
between two waits for the GPU. Against nanoGPT's loop both sides are compiled; against the Hugging Face Trainer neither
is. `slow` compares a naive loop (rows made by Python, fp32, no flash attention, not compiled) with our trainer as a
user runs it. `memory` is the allocator's peak. `start` is the seconds of the first two steps, with an empty and then
with a filled compile cache, each in a process of its own. `mfu` is our trainer alone, with the plan's estimate beside
it and the profiler's shares of a step. `loss` is our loop with its loss compiled by chunks, in eager chunks, and with
whole logits. No row begins in the last of the minutes.

`--try` runs everything with small models on the CPU, to show that the script works before a GPU is paid for.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import statistics
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from gpurun.providers.catalog import cards
from tests.bench.contest import Ours, Row, interval, memory_row, rival, shards_of, speed, where
from tests.bench.reference_loop import Shape, card_clock
from tests.memory import own_peak_bytes
from trainer.cards import PEAKS
from trainer.distributed import peak_flops

ROWS = "mfu,loss,124m,memory,start,10m,slow"
LAST_S = 60.0
"""An estimate, made without a GPU, of how long the longest row takes."""
PROFILED_STEPS = 10
BOTH, OURS = frozenset({"ours", "plain"}), frozenset({"ours"})
TEN, GPT2 = Shape(6, 6, 384, 256, 65, 64, bias=True), Shape(12, 12, 768, 1024, 50304, 16, bias=True)
APART = 3e-2  # bf16 keeps eight bits, and each contestant rounds at other places
CONTESTS = {
    "10m": [
        Row("10.6M (vocabulary 65, 64 x 256), compiled", TEN, 50, {"plain": None}, None, BOTH, "bf16", APART),
        Row("the same, eager", TEN, 50, {"huggingface": 1.5}, None, frozenset(), "bf16", APART),
    ],
    "124m": [
        Row("GPT-2 124M, 16 x 1024, compiled", GPT2, 20, {"plain": 1.05}, None, BOTH, "bf16", APART),
        Row("the same, eager", GPT2, 20, {"huggingface": 1.2}, None, frozenset(), "bf16", APART),
    ],
    "slow": [Row("GPT-2 124M, 16 x 1024", GPT2, 5, {"slow": 16.0}, None, OURS, "bf16", APART)],
}
LARGE = Row("GPT-2 124M, 64 x 1024, bf16", replace(GPT2, batch=64), 20, {}, 0.45, BOTH, "bf16")
KINDS = (
    ("matrix products", ("gemm", "cutlass", "nvjet", "xmma", "cublas", "aten::mm", "aten::addmm")),
    ("attention", ("flash", "fmha", "attention")),
    ("fused by the compiler", ("triton", "cpp_fused")),
    ("optimiser", ("adam", "multi_tensor")),
    ("copies", ("memcpy", "memset", "copy_")),
)
"""Kinds of GPU kernels, and the parts of a kernel's name that tell its kind."""


def small(row: Row) -> Row:
    """Return the same comparison with a model that a CPU trains in a moment, not compiled."""
    shape = Shape(1, 2, 16, 16, 65, 2, bias=True)
    return replace(row, what=f"TRIAL, measures nothing: {row.what}", shape=shape, steps=2, compiled=frozenset())


def own_process(kind: str, row: str, name: str, work: Path, *, is_trial: bool) -> float:
    """Start this script in a new process for one measurement, and return its figure."""
    argv = [sys.executable, __file__, "--alone", f"{kind}:{row}:{name}", "--work", str(work)]
    done = subprocess.run([*argv, *(["--try"] if is_trial else [])], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def measured_alone(kind: str, row: Row, name: str, work: Path) -> float:
    """Return the peak bytes after a few steps or, for "start", the seconds that the first two steps took."""
    file = shards_of(row.shape, work)
    before = own_peak_bytes()
    out = Path(tempfile.mkdtemp(dir=work))
    if kind == "start":
        loop = Ours(replace(row, compiled=OURS), file.parent, out)
        began = card_clock()
        loop.block(1, card_clock)
        return card_clock() - began
    loop = Ours(row, file.parent, out) if name == "ours" else rival(name, row, file)
    loop.block(3, card_clock)
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else own_peak_bytes() - before


def memory(row: Row, work: Path, *, is_trial: bool) -> None:
    """Print our peak memory divided by the plain loop's, both compiled, each in a process of its own."""
    ours, theirs = (int(own_process("memory", "large", name, work, is_trial=is_trial)) for name in ("ours", "plain"))
    assert row.memory_bar is not None
    what = "TRIAL, measures nothing" if is_trial else row.what
    memory_row(f"{what}, compiled, the allocator's peak", ours, theirs, row.memory_bar)


def start(row: Row, work: Path, *, is_trial: bool) -> None:
    """Print the seconds of the first two steps with an empty compile cache, and again with the cache filled."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        cold, warm = (own_process("start", "large", "ours", work, is_trial=is_trial) for _ in range(2))
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    what = "TRIAL, measures nothing" if is_trial else row.what
    print(f"| {what}: first two steps, compile cache empty / filled | {cold:.1f} s / {warm:.1f} s | {where()} |",
          flush=True)  # fmt: skip


def mfu(row: Row, work: Path, rounds: int) -> None:
    """Print our share of the GPU's peak FLOPs, and where a step's time goes."""
    file = shards_of(row.shape, work)
    ours = Ours(row, file.parent, Path(tempfile.mkdtemp(dir=work)))
    ours.block(row.steps, card_clock)  # compiles
    steps_s = [ours.block(row.steps, card_clock)[0] for _ in range(rounds)]
    rates = [row.shape.batch * row.shape.context / step_s for step_s in steps_s]
    flops, peak = ours.run.setup.model.flops_per_token(), peak_flops(ours.run.setup.device)
    figure = "no peak is known of this card"
    if peak is not None and flops is not None:
        low, high = (flops * rate / peak for rate in interval(rates))
        share = flops * statistics.median(rates) / peak
        figure = f"MFU **{share:.1%}** ({low:.1%} to {high:.1%}), {prior(ours.run.setup.device.cuda_name or '')}"
    print(f"| {row.what}, ours | {statistics.median(rates):,.0f} tokens/s, {figure} | {where()} |", flush=True)
    print(f"| where its step goes | {shares_of_a_step(ours)} | {where()} |", flush=True)


def prior(cuda_name: str) -> str:
    """Return the MFU that a plan assumes for this GPU, as words for the table."""
    for kind, card in cards().items():
        if re.search(PEAKS[kind][0], cuda_name) and card.expected_mfu is not None:
            return f"planned {card.expected_mfu:.0%} of {card.mfu[0]:.0%} to {card.mfu[1]:.0%}"
    return "planned with a range alone"


def whole_logits(hidden: Tensor, weight: Tensor, targets: Tensor, **_: object) -> Tensor:
    """Return the loss as nanoGPT computes it: all logits in one tensor."""
    return F.cross_entropy(F.linear(hidden, weight), targets)


def losses(row: Row, work: Path, rounds: int) -> None:
    """Print our loop's speed and peak memory with each kind of loss, in turn on the same training."""
    ours = Ours(row, shards_of(row.shape, work).parent, Path(tempfile.mkdtemp(dir=work)))
    chunked = "trainer.model.chunked_cross_entropy"
    compiled = torch.compile(whole_logits, dynamic=False) if row.compiled else whole_logits
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "compiled by chunks": lambda: mock.patch.object(ours.run.setup.gpt, "compiled", bool(row.compiled)),
        "chunks, step by step": lambda: mock.patch.object(ours.run.setup.gpt, "compiled", False),
        "whole logits, compiled": lambda: mock.patch(chunked, compiled),
    }
    steps_s: dict[str, list[float]] = {way: [] for way in ways}
    peaks, plan = dict.fromkeys(ways, 0), ours.run.state.plan
    for number in range(rounds + 1):
        for way in list(steps_s):
            with ways[way]():
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                found = ours.block(row.steps if number else 1, card_clock)[0]
            if ours.run.state.plan is not plan:  # The loop ran out of memory and now takes smaller portions.
                print(f"| {row.what}, {way} | does not fit | {where()} |", flush=True)
                del steps_s[way]
                ours.run.state.plan = plan
                ours.run.io.close_feed()
                continue
            peaks[way] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else own_peak_bytes()
            steps_s[way] += [found] if number else []  # The first block compiles.
    for way, found_s in steps_s.items():
        rate = row.shape.batch * row.shape.context / statistics.median(found_s)
        print(f"| {row.what}, {way} | {rate:,.0f} tokens/s, {peaks[way] / 2**20:,.0f} MiB | {where()} |", flush=True)


def shares_of_a_step(ours: Ours) -> str:
    """Return the shares of GPU (or processor) time by kind of kernel and, on a GPU, the share spent waiting."""
    on_card = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if on_card else torch.profiler.ProfilerActivity.CPU
    began = card_clock()
    with torch.profiler.profile(activities=[activity]) as seen:
        for _ in range(PROFILED_STEPS):
            ours.take()
        wall_us = (card_clock() - began) * 1e6
    spent: Counter[str] = Counter()
    for event in seen.key_averages():
        own_us = event.self_device_time_total if on_card else event.self_cpu_time_total
        name = event.key.lower()
        spent[next((kind for kind, parts in KINDS if any(part in name for part in parts)), "other")] += own_us
    if on_card:
        spent["waiting"] = max(0, wall_us - sum(spent.values()))
    whole = sum(spent.values())
    return ", ".join(f"{kind} {share / whole:.1%}" for kind, share in spent.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--try", action="store_true", dest="is_trial")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.is_trial:
        sys.exit("no CUDA card is here; --try runs the same on the CPU with small models, which measures nothing")
    torch.manual_seed(0)
    fitted = small if given.is_trial else (lambda row: row)
    if given.alone:
        kind, _, name = given.alone.split(":")
        print(measured_alone(kind, fitted(LARGE), name, given.work))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        work = Path(folder)
        end_s = time.monotonic() + 60 * given.minutes - LAST_S
        for key in given.rows.split(","):
            if time.monotonic() > end_s:
                print(f"| {key} | not measured: the time is over | |", flush=True)
                continue
            for row in CONTESTS.get(key, ()):
                speed(fitted(row), work, given.rounds, card_clock)
            if key == "memory":
                memory(LARGE, work, is_trial=given.is_trial)
            elif key == "start":
                start(LARGE, work, is_trial=given.is_trial)
            elif key == "mfu":
                mfu(fitted(LARGE), work, given.rounds)
            elif key == "loss":
                losses(fitted(LARGE), work, given.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
