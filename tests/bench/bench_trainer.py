"""Speed and memory of the trainer against a plain loop and the Hugging Face Trainer: run by `make bench-trainer`.

    python tests/bench/bench_trainer.py [--rounds 8] [--threads 2] [--cpu-time]
        [--rows small,compiled,mini,tiny,memory,stall]

Everything runs on the CPU in fp32 without dropout, on one shard of random tokens, and eagerly except in the row
`compiled`. First comes a gate: from the same weights and batches, the losses of 20 steps must agree to 1e-3, or the row
is void. Then all contestants take blocks of steps in turn, in an order that is reversed every round. Each round gives
the ratio of the median step times; the result is the median of these ratios, with its 95 % bootstrap interval. A win is
an interval above 1. `--cpu-time` counts processor seconds instead of wall time: use it with one thread on a machine
with other work. Peak memory is measured in a process of its own (resident memory above that before the model exists)
and, for 124M at 64 x 1024 in bf16, traced by torch's MemTracker on fake tensors. `--rows stall` measures what a
checkpoint costs: blocks with a checkpoint, until it is on the disk, and blocks without, in turn; the difference is
divided by the time of the 250 steps between two checkpoints. Prints rows for docs/dev/BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import statistics

import torch

from tests.bench.contest import (
    RATE,
    Clock,
    Ours,
    Row,
    interval,
    memory_row,
    rival,
    shards_of,
    speed,
    where,
)
from tests.bench.reference_loop import PlainGPT, Shape, plain_adamw
from tests.memory import own_peak_bytes
from trainer.model import GPT
from trainer.optim import make_optimizer
from trainer.recipe import ModelConfig, OptimConfig
from trainer.train import save

ROOT = Path(__file__).parents[2]
MEMORY_STEPS = 3
CHECKPOINT_STEPS, STALL_BAR = 250, 0.01
GPT2 = Shape(layers=12, heads=12, width=768, context=1024, vocab_size=50304, batch=64, bias=True)
BOTH = frozenset({"ours", "plain"})

ROWS = {
    "small": Row("nanoGPT's CPU config (0.8M, vocabulary 65, 12 x 64)",
                 Shape(4, 4, 128, 64, 65, 12, bias=False), 20, {"plain": 1.0}),
    "compiled": Row("the same, compiled on both sides",
                    Shape(4, 4, 128, 64, 65, 12, bias=False), 20, {"plain": 1.0}, compiled=BOTH),
    "mini": Row("mini-gpt on a CPU (0.1M, vocabulary 128, 16 x 64)",
                Shape(2, 2, 64, 64, 128, 16, bias=True), 30, {"plain": None, "huggingface": 2.5}),
    "tiny": Row("tiny (12M, vocabulary 50304, 8 x 256)",
                Shape(6, 6, 192, 256, 50304, 8, bias=True), 2, {"plain": 1.1}, memory_bar=0.5),
}  # fmt: skip


def lost_to_a_checkpoint(row: Row, work: Path, rounds: int, clock: Clock) -> list[float]:
    """Return, for every round, the share of 250 steps' time that one checkpoint adds."""
    file = shards_of(row.shape, work)
    ours = Ours(row, file.parent, Path(tempfile.mkdtemp(dir=work)))
    blocks: dict[bool, list[float]] = {True: [], False: []}
    ours.take()
    gc.collect()
    gc.freeze()  # as the loop does after its first step
    gc.disable()
    for number in range(rounds):
        for saving in (True, False) if number % 2 else (False, True):
            ours.take()
            began = clock()
            if saving:
                save(*ours.run)
            for _ in range(row.steps):
                ours.take()
            ours.run.io.finish_saving()
            blocks[saving].append(clock() - began)
    gc.unfreeze()
    gc.enable()
    pairs = zip(blocks[True], blocks[False], strict=True)
    return [(with_one - without) / (CHECKPOINT_STEPS * without / row.steps) for with_one, without in pairs]


def stall(work: Path, rounds: int, clock: Clock) -> None:
    """Print what one checkpoint per 250 steps costs on each row."""
    for row in (row for row in ROWS.values() if not row.compiled):
        shares = lost_to_a_checkpoint(row, work, rounds, clock)
        low, high = interval(shares)
        reached = "yes" if high <= STALL_BAR else "NO" if low > STALL_BAR else "not shown"
        found = f"**{statistics.median(shares):.3%}** ({low:.3%} to {high:.3%})"
        print(f"| {row.what} | {found} | <= {STALL_BAR:.0%} | {reached} | {where()} |", flush=True)


def resident_bytes(key: str, name: str, work: Path, threads: int) -> int:
    """Return the resident bytes that a contestant adds, measured in a process of its own."""
    argv = [sys.executable, __file__, "--peak", f"{key}:{name}", "--work", str(work), "--threads", str(threads)]
    return int(subprocess.run(argv, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


def traced_bytes(name: str) -> int:
    """Return the peak bytes of two steps of GPT-2 124M, 64 x 1024 tokens in bf16 autocast, traced on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        if name == "ours":
            config = ModelConfig(layers=GPT2.layers, heads=GPT2.heads, width=GPT2.width, context=GPT2.context,
                                 vocab_size=GPT2.vocab_size)  # fmt: skip
            model: torch.nn.Module = GPT(config)
            optimizer: torch.optim.Optimizer = make_optimizer(model, OptimConfig(lr=RATE))
        else:
            model = PlainGPT(GPT2)
            optimizer = plain_adamw(model, RATE)
        ids = torch.zeros(GPT2.batch, GPT2.context, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, ids)
        with tracker:
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(ids, ids)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                tracker.reset_mod_stats()
        peaks = tracker.get_tracker_snapshot("peak")
    return int(peaks[torch.device("cpu")]["Total"])


def memory(work: Path, threads: int) -> None:
    """Print our peak memory divided by the plain loop's."""
    for key, row in ROWS.items():
        if row.memory_bar is not None:
            shards_of(row.shape, work)
            ours, theirs = (resident_bytes(key, name, work, threads) for name in ("ours", "plain"))
            memory_row(f"{row.what}, resident memory", ours, theirs, row.memory_bar)
    memory_row("GPT-2 124M, 64 x 1024, bf16, traced", traced_bytes("ours"), traced_bytes("plain"), 0.45)


def print_peak(key: str, name: str, work: Path) -> None:
    """Print by how many bytes the resident peak rises above that before the model exists. Call it in a new process."""
    row = ROWS[key]
    file = shards_of(row.shape, work)
    first = PlainGPT(Shape(1, 1, 8, 8, 8, 1, bias=True))  # what torch loads at its first step must not count
    optimizer, ids = plain_adamw(first, RATE), torch.zeros(1, 8, dtype=torch.int64)
    first(ids, ids).backward()
    torch.nn.utils.clip_grad_norm_(first.parameters(), 1.0)
    optimizer.step()
    before = own_peak_bytes()
    out = Path(tempfile.mkdtemp(dir=work))
    loop = Ours(row, file.parent, out) if name == "ours" else rival(name, row, file)
    loop.block(MEMORY_STEPS, time.perf_counter)
    print(own_peak_bytes() - before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="small,compiled,mini,tiny,memory,stall")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    if given.peak:
        print_peak(*given.peak.split(":"), given.work)
        return 0
    clock = time.process_time if given.cpu_time else time.perf_counter
    print("| what | against | ours over theirs (95 %) | ours / theirs | bar | reached | date, machine |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as folder:
        for key in given.rows.split(","):
            if key == "memory":
                memory(Path(folder), given.threads)
            elif key == "stall":
                stall(Path(folder), given.rounds, clock)
            else:
                speed(ROWS[key], Path(folder), given.rounds, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
