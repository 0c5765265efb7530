"""Speed and memory of the trainer against a plain loop and the Hugging Face Trainer: run by `make bench-trainer`.

    python tests/bench/bench_trainer.py [--rounds 8] [--threads 2] [--cpu-time]
        [--rows small,compiled,mini,tiny,memory,stall]

Eager but where both are compiled, fp32, no dropout, on the CPU, all on one shard of random tokens. A gate comes first:
from the same weights and batches, the losses of 20 steps agree to 1e-3, or the row is void. Then all take blocks of
steps in turn, in an order that turns round every round; of each round only the ratio of the medians counts, and of
these ratios the median, with the interval that holds it in 95 % of bootstrap draws. A win is one whose interval is
above 1. `--cpu-time` counts the process's seconds on the processor instead: for a machine with other work, and one
thread. Peak memory is taken in a process of its own (resident, above what was there before the model), and, for 124M at
64 x 1024 in bf16, traced by torch's MemTracker on fake tensors. `--rows stall` is what a checkpoint costs: blocks with
one, until it is on the disk, and blocks without, in turn, over the time of the 250 steps that lie between two. Prints
rows for docs/BENCHMARKS.md.

Ours is the step of the real loop, out of a recipe and a data folder; the garbage collector rests in it, as in the loop.
"""

from __future__ import annotations

import argparse
import base64
import gc
import hashlib
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
from torch import Tensor

from tests.bench.recipes import measured_recipe
from tests.bench.reference_loop import PlainGPT, PlainLoop, Shape, plain_adamw
from tests.memory import own_peak_bytes
from trainer.assemble import assemble
from trainer.config import ModelConfig, OptimConfig
from trainer.device import choose_device
from trainer.distributed import Processes
from trainer.due import finish_saving, save
from trainer.events import Reporter
from trainer.model import GPT
from trainer.optim import make_optimizer
from trainer.run import Progress
from trainer.step import Stepper

ROOT = Path(__file__).parents[2]
GATE_STEPS, GATE = 20, 1e-3
RATE = 1e-3
TOKENS = 1_000_000
MEMORY_STEPS = 3
CHECKPOINT_STEPS, STALL_BAR = 250, 0.01
GPT2 = Shape(layers=12, heads=12, width=768, context=1024, vocab_size=50304, batch=64, bias=True)

Batch = tuple[Tensor, Tensor]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """One comparison: whom it is against, and what the bars are."""

    what: str
    shape: Shape
    steps: int
    """Of a block."""
    bars: Mapping[str, float | None]
    """The least ratio of tokens a second, for each rival; None: it is only shown."""
    memory_bar: float | None = None
    is_compiled: bool = False
    """By torch.compile, on both sides."""


ROWS = {
    "small": Row("nanoGPT's CPU config (0.8M, vocabulary 65, 12 x 64)",
                 Shape(4, 4, 128, 64, 65, 12, bias=False), 20, {"plain": 1.0}),
    "compiled": Row("the same, compiled on both sides",
                    Shape(4, 4, 128, 64, 65, 12, bias=False), 20, {"plain": 1.0}, is_compiled=True),
    "mini": Row("mini-gpt on a CPU (0.1M, vocabulary 128, 16 x 64)",
                Shape(2, 2, 64, 64, 128, 16, bias=True), 30, {"plain": None, "huggingface": 2.5}),
    "tiny": Row("tiny (12M, vocabulary 50304, 8 x 256)",
                Shape(6, 6, 192, 256, 50304, 8, bias=True), 2, {"plain": 1.1}, memory_bar=0.5),
}  # fmt: skip
NAMES = {"ours": "ours", "plain": "the plain loop", "huggingface": "the Hugging Face Trainer"}


class Loop(Protocol):
    """Whoever trains: on given batches for the gate, then in timed blocks."""

    def losses(self, batches: list[Batch]) -> list[float]: ...
    def block(self, steps: int, clock: Clock) -> list[float]: ...


class Ours:
    """The step of the real loop."""

    def __init__(self, shape: Shape, data: Path, out: Path, *, is_compiled: bool = False) -> None:
        batch_tokens = shape.batch * shape.context
        recipe = measured_recipe(
            model={
                "layers": shape.layers, "heads": shape.heads, "width": shape.width, "context": shape.context,
                "vocab_size": shape.vocab_size, "bias": shape.bias,
            },
            optim={"lr": RATE},
            train={"batch_tokens": batch_tokens, "micro_batch": shape.batch, "compile": is_compiled},
        )  # fmt: skip
        said, sys.stdout = sys.stdout, sys.stderr
        try:
            self.run = assemble(
                recipe, (data, out), processes=Processes(), device=choose_device("fp32", 0, 1),
                reporter=Reporter(out, is_first=True), stop_asked=threading.Event(), progress=Progress(),
            )  # fmt: skip
        finally:
            sys.stdout = said
        self.stepper = Stepper(self.run)

    def take(self) -> float:
        loss = self.stepper.take().loss
        self.run.progress.step += 1
        return loss

    def losses(self, batches: list[Batch]) -> list[float]:
        """The run's own batches; these must be they."""
        return [self.take() for _ in batches]

    def block(self, steps: int, clock: Clock) -> list[float]:
        gc.collect()
        gc.disable()
        try:
            return timed(self.take, steps, clock)
        finally:
            gc.enable()


class Plain:
    """The plain loop."""

    def __init__(self, shape: Shape, file: Path, *, is_compiled: bool = False) -> None:
        self.loop = PlainLoop(shape, file, RATE, is_compiled=is_compiled)

    def losses(self, batches: list[Batch]) -> list[float]:
        return [self.loop.take(batch).item() for batch in batches]

    def block(self, steps: int, clock: Clock) -> list[float]:
        gc.collect()
        return timed(self.loop.take, steps, clock)


def timed(take: Callable[[], Any], steps: int, clock: Clock) -> list[float]:
    """The seconds of each step; the first one, after another's turn, is not counted."""
    take()
    found = []
    for _ in range(steps):
        began = clock()
        take()
        found.append(clock() - began)
    return found


def shards_of(shape: Shape, work: Path) -> Path:
    """The train shard of this vocabulary, which is made if it is not there."""
    file = work / str(shape.vocab_size) / "train_000000.bin"
    if not file.exists():
        write_shards(file.parent, shape.vocab_size)
    return file


def write_shards(folder: Path, vocab_size: int) -> None:
    """Write random tokens as docs/FORMATS.md has a data folder."""
    folder.mkdir(parents=True)
    dice, tokens = np.random.default_rng(0), [number.to_bytes(2, "big") for number in range(vocab_size)]
    entries = {}
    for part, count in (("train", TOKENS), ("val", TOKENS // 10)):
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, count
        content = header.tobytes() + dice.integers(vocab_size, size=count).astype("<u2").tobytes()
        (folder / f"{part}_000000.bin").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        entries[part] = [{"name": f"{part}_000000.bin", "tokens": count, "bytes": len(content), "sha256": digest}]
    digest = hashlib.sha256(b"".join(len(token).to_bytes(4, "little") + token for token in tokens)).hexdigest()
    known = {"name": "char", "sha256": digest, "vocab_size": vocab_size, "eot_id": None}
    source = {"kind": "random", "digest": "0" * 64, "documents": 1, "bytes": 0}
    manifest = {"v": 1, "dtype": "uint16", "eot": "none", "tokenizer": known, "source": source, **entries}
    vocab = {"v": 1, "name": "char", "tokens_b64": [base64.b64encode(token).decode() for token in tokens]}
    for name, record in (("data.json", manifest), ("vocab.json", vocab), ("prompts.json", [])):
        (folder / name).write_text(json.dumps(record))


@dataclass
class Contest:
    """Ours and its rivals on one row, all with the same weights."""

    row: Row
    loops: dict[str, Loop] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, work: Path, names: tuple[str, ...]) -> Contest:
        file = shards_of(row.shape, work)
        contest = cls(row)
        ours = Ours(row.shape, file.parent, Path(tempfile.mkdtemp(dir=work)), is_compiled=row.is_compiled)
        weights = {name: w.detach().clone() for name, w in ours.run.model.state_dict().items()}
        for name in names:
            if name == "ours":
                contest.loops[name] = ours
            elif name == "plain":
                plain = Plain(row.shape, file, is_compiled=row.is_compiled)
                plain.loop.model.load_state_dict(weights)
                contest.loops[name] = plain
            elif name == "huggingface":
                from tests.bench.huggingface_loop import HuggingFaceLoop

                stock = HuggingFaceLoop(row.shape, file, RATE, work / "huggingface")
                stock.load(weights)
                contest.loops[name] = stock
        return contest

    def gate(self) -> dict[str, float]:
        """The largest difference between our losses and each rival's over the gate's steps."""
        ours, size = self.loops["ours"], self.row.shape.batch
        assert isinstance(ours, Ours)
        batches = [ours.run.train_samples.read(step * size, size) for step in range(GATE_STEPS)]
        found = {name: loop.losses(batches) for name, loop in self.loops.items()}
        pairs = {name: zip(found["ours"], losses, strict=True) for name, losses in found.items() if name != "ours"}
        return {name: max(abs(a - b) for a, b in pair) for name, pair in pairs.items()}

    def rounds(self, count: int, clock: Clock) -> dict[str, list[float]]:
        """The median step of each in every round."""
        medians: dict[str, list[float]] = {name: [] for name in self.loops}
        for number in range(count):
            for name in list(self.loops)[:: 1 if number % 2 else -1]:
                medians[name].append(statistics.median(self.loops[name].block(self.row.steps, clock)))
        return medians


def interval(ratios: list[float], draws: int = 4000) -> tuple[float, float]:
    """The bootstrap's 95 % interval of the median."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def where() -> str:
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    return f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {threads}, torch {torch.__version__}"


def speed(row: Row, work: Path, rounds: int, clock: Clock) -> None:
    """Print what ours is against each rival on this row."""
    installed = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))
    rivals = [name for name in row.bars if name != "huggingface" or installed]
    contest = Contest.of(row, work, ("ours", *rivals))
    apart = contest.gate()
    seen = contest.rounds(rounds, clock)
    tokens = row.shape.batch * row.shape.context
    for name, bar in row.bars.items():
        told = "no bar" if bar is None else f">= {bar}x"
        if name not in rivals:
            print(f"| {row.what} | {NAMES[name]} | not measured: not installed | | {told} | | |")
            continue
        if apart[name] > GATE:
            print(f"| {row.what} | {NAMES[name]} | void: losses {apart[name]:.1e} apart | | {told} | | |")
            continue
        ratios = [theirs / ours for ours, theirs in zip(seen["ours"], seen[name], strict=True)]
        low, high = interval(ratios)
        reached = "" if bar is None else "yes" if low >= bar else "NO" if high < bar else "not shown"
        rates = [f"{tokens / statistics.median(seen[one]):,.0f}" for one in ("ours", name)]
        ratio = f"**{statistics.median(ratios):.2f}x** ({low:.2f} to {high:.2f})"
        print(f"| {row.what} | {NAMES[name]} | {ratio} | {rates[0]} / {rates[1]} | {told} | {reached} | {where()} |",
              flush=True)  # fmt: skip


def lost_to_a_checkpoint(row: Row, work: Path, rounds: int, clock: Clock) -> list[float]:
    """The share of 250 steps' time that one checkpoint adds to them, in every round."""
    file = shards_of(row.shape, work)
    ours = Ours(row.shape, file.parent, Path(tempfile.mkdtemp(dir=work)))
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
                save(ours.run, None)
            for _ in range(row.steps):
                ours.take()
            finish_saving(ours.run)
            blocks[saving].append(clock() - began)
    gc.unfreeze()
    gc.enable()
    pairs = zip(blocks[True], blocks[False], strict=True)
    return [(with_one - without) / (CHECKPOINT_STEPS * without / row.steps) for with_one, without in pairs]


def stall(work: Path, rounds: int, clock: Clock) -> None:
    """Print what one checkpoint per 250 steps costs on each row."""
    for row in (row for row in ROWS.values() if not row.is_compiled):
        shares = lost_to_a_checkpoint(row, work, rounds, clock)
        low, high = interval(shares)
        reached = "yes" if high <= STALL_BAR else "NO" if low > STALL_BAR else "not shown"
        found = f"**{statistics.median(shares):.3%}** ({low:.3%} to {high:.3%})"
        print(f"| {row.what} | {found} | <= {STALL_BAR:.0%} | {reached} | {where()} |", flush=True)


def resident_bytes(key: str, name: str, work: Path, threads: int) -> int:
    """Peak memory of a few steps, in a process of its own."""
    argv = [sys.executable, __file__, "--peak", f"{key}:{name}", "--work", str(work), "--threads", str(threads)]
    return int(subprocess.run(argv, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


def traced_bytes(name: str) -> int:
    """Peak memory of two steps of GPT-2 124M, 64 x 1024 tokens under bf16 autocast, on tensors that hold nothing."""
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


def memory_row(what: str, ours: int, theirs: int, bar: float) -> None:
    ratio = ours / theirs
    reached = "yes" if ratio <= bar else "NO"
    sizes = f"{ours / 2**20:,.0f} / {theirs / 2**20:,.0f} MiB"
    print(f"| {what} | {NAMES['plain']} | **{ratio:.2f}x** | {sizes} | <= {bar}x | {reached} | {where()} |", flush=True)


def memory(work: Path, threads: int) -> None:
    """Print our peak memory over the plain loop's."""
    for key, row in ROWS.items():
        if row.memory_bar is not None:
            shards_of(row.shape, work)
            ours, theirs = (resident_bytes(key, name, work, threads) for name in ("ours", "plain"))
            memory_row(f"{row.what}, resident memory", ours, theirs, row.memory_bar)
    memory_row("GPT-2 124M, 64 x 1024, bf16, traced", traced_bytes("ours"), traced_bytes("plain"), 0.45)


def print_peak(key: str, name: str, work: Path) -> None:
    """In a process of its own: how far the resident memory rises above what was there before the model."""
    row = ROWS[key]
    file = shards_of(row.shape, work)
    first = PlainGPT(Shape(1, 1, 8, 8, 8, 1, bias=True))  # what torch loads and keeps at its first step is no model's
    optimizer, ids = plain_adamw(first, RATE), torch.zeros(1, 8, dtype=torch.int64)
    first(ids, ids).backward()
    torch.nn.utils.clip_grad_norm_(first.parameters(), 1.0)
    optimizer.step()
    before = own_peak_bytes()
    out = Path(tempfile.mkdtemp(dir=work))
    loop: Loop = Ours(row.shape, file.parent, out) if name == "ours" else Plain(row.shape, file)
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
