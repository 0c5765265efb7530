"""The contestants of the training benchmarks: ours, a plain loop, the Hugging Face Trainer and the slow way.

All start from the same weights and, for the gate, take the same batches; then they take blocks of steps in turn. Ours
is the step of the real loop with a recipe and a data folder, with the garbage collector off, as in the loop.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tests.bench.recipes import measured_recipe
from tests.bench.reference_loop import PlainLoop, Shape, SlowLoop, card_clock
from trainer.distributed import Processes, choose_device
from trainer.events import Reporter
from trainer.start import open_run
from trainer.train import take_step

GATE_STEPS = 20
RATE = 1e-3
TOKENS = 1_000_000
NAMES = {
    "ours": "ours", "plain": "the plain loop", "huggingface": "the Hugging Face Trainer", "slow": "the slow way",
}  # fmt: skip

Batch = tuple[Tensor, Tensor]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """One comparison: the model, the rivals and the bars."""

    what: str
    shape: Shape
    steps: int
    """The steps of one timed block."""
    bars: Mapping[str, float | None]
    """The least ratio of tokens a second against each rival; None: the ratio is shown without a bar."""
    memory_bar: float | None = None
    compiled: frozenset[str] = frozenset()
    """The names of the contestants that torch.compile compiles."""
    precision: str = "fp32"
    """The precision of all contestants except the slow way, which is always fp32."""
    gate: float = 1e-3
    """How far apart the losses of the same batches may be: more in bf16, where each contestant rounds differently."""


class Loop(Protocol):
    """A contestant that trains: on given batches for the gate, then in timed blocks."""

    def losses(self, batches: list[Batch]) -> list[float]: ...
    def block(self, steps: int, clock: Clock) -> list[float]: ...


class Ours:
    """A contestant that takes the step of the real loop."""

    def __init__(self, row: Row, data: Path, out: Path) -> None:
        shape = row.shape
        recipe = measured_recipe(
            model={
                "layers": shape.layers, "heads": shape.heads, "width": shape.width, "context": shape.context,
                "vocab_size": shape.vocab_size, "bias": shape.bias,
            },
            optim={"lr": RATE},
            train={
                "batch_tokens": shape.batch * shape.context, "micro_batch": shape.batch,
                "compile": "ours" in row.compiled, "precision": row.precision,
            },
        )  # fmt: skip
        said, sys.stdout = sys.stdout, sys.stderr
        try:
            self.run = open_run(
                recipe, data, out, processes=Processes(), device=choose_device(row.precision, 0, 1),
                reporter=Reporter(out, is_first=True),
            )  # fmt: skip
        finally:
            sys.stdout = said

    def take(self) -> float:
        figures, _ = take_step(*self.run)
        self.run.state.step += 1
        return figures["loss"]

    def losses(self, batches: list[Batch]) -> list[float]:
        """Return the losses of the run's own next batches, which must be the given ones."""
        return [self.take() for _ in batches]

    def block(self, steps: int, clock: Clock) -> list[float]:
        gc.collect()
        gc.disable()
        try:
            return timed(self.take, steps, clock)
        finally:
            gc.enable()


class Written:
    """A contestant made of a loop of `reference_loop.py`."""

    def __init__(self, loop: PlainLoop) -> None:
        self.loop = loop

    def losses(self, batches: list[Batch]) -> list[float]:
        return [self.loop.take(batch).item() for batch in batches]

    def block(self, steps: int, clock: Clock) -> list[float]:
        gc.collect()
        return timed(self.loop.take, steps, clock)


def timed(take: Callable[[], Any], steps: int, clock: Clock) -> list[float]:
    """Return the seconds of each step. The first step, after another contestant's turn, is not counted.

    With the GPU's clock the block is timed as a whole, because a wait after each step would keep the loop from running
    ahead; the result is then one mean.
    """
    take()
    found = []
    for count in [steps] if clock is card_clock else [1] * steps:
        began = clock()
        for _ in range(count):
            take()
        found.append((clock() - began) / count)
    return found


def shards_of(shape: Shape, work: Path) -> Path:
    """Return the train shard of this vocabulary; write it first if it is missing."""
    file = work / str(shape.vocab_size) / "train_000000.bin"
    if not file.exists():
        write_shards(file.parent, shape.vocab_size)
    return file


def write_shards(folder: Path, vocab_size: int) -> None:
    """Write random tokens as a data folder of docs/FORMATS.md."""
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
        """Make the named contestants. "ours" must be among them, because all take its weights."""
        file = shards_of(row.shape, work)
        ours = Ours(row, file.parent, Path(tempfile.mkdtemp(dir=work)))
        weights = {name: w.detach().clone() for name, w in ours.run.setup.model.state_dict().items()}
        made = {name: ours if name == "ours" else rival(name, row, file, weights) for name in names}
        return cls(row, made)

    def gate(self) -> dict[str, float]:
        """Return the largest difference between our losses and each rival's over the gate's steps."""
        ours, size = self.loops["ours"], self.row.shape.batch
        assert isinstance(ours, Ours)
        batches = [ours.run.setup.task.train_samples.read(step * size, size) for step in range(GATE_STEPS)]
        found = {name: loop.losses(batches) for name, loop in self.loops.items()}
        pairs = {name: zip(found["ours"], losses, strict=True) for name, losses in found.items() if name != "ours"}
        return {name: max(abs(a - b) for a, b in pair) for name, pair in pairs.items()}

    def rounds(self, count: int, clock: Clock) -> dict[str, list[float]]:
        """Return the median step time of each contestant in every round."""
        medians: dict[str, list[float]] = {name: [] for name in self.loops}
        for number in range(count):
            for name in list(self.loops)[:: 1 if number % 2 else -1]:
                medians[name].append(statistics.median(self.loops[name].block(self.row.steps, clock)))
        return medians


def rival(name: str, row: Row, file: Path, weights: Mapping[str, Tensor] | None = None) -> Loop:
    """Return the rival of that name, with these weights, or with its own initial weights if None."""
    if name == "huggingface":
        from tests.bench.huggingface_loop import HuggingFaceLoop

        stock = HuggingFaceLoop(row.shape, file, RATE, file.parent / "huggingface", precision=row.precision)
        if weights is not None:
            stock.load(weights)
        return stock
    if name == "slow":
        loop: PlainLoop = SlowLoop(row.shape, file, RATE)
    else:
        loop = PlainLoop(row.shape, file, RATE, is_compiled=name in row.compiled, precision=row.precision)
    if weights is not None:
        loop.model.load_state_dict(weights)
    return Written(loop)


def interval(ratios: list[float], draws: int = 4000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def where() -> str:
    """Return the date and machine as a row of docs/dev/BENCHMARKS.md has them."""
    place = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    if torch.cuda.is_available():
        place = torch.cuda.get_device_name()
    return f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {place}, torch {torch.__version__}"


def speed(row: Row, work: Path, rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Print our speed against each rival on this row; return the median step time of each in every round."""
    installed = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))
    rivals = [name for name in row.bars if name != "huggingface" or installed]
    contest = Contest.of(row, work, ("ours", *rivals))
    apart = contest.gate()
    seen = contest.rounds(rounds, clock)
    tokens = row.shape.batch * row.shape.context
    for name, bar in row.bars.items():
        needed = "no bar" if bar is None else f">= {bar}x"
        if name not in rivals:
            print(f"| {row.what} | {NAMES[name]} | not measured: not installed | | {needed} | | |")
            continue
        if apart[name] > row.gate:
            print(f"| {row.what} | {NAMES[name]} | void: losses {apart[name]:.1e} apart | | {needed} | | |")
            continue
        ratios = [theirs / ours for ours, theirs in zip(seen["ours"], seen[name], strict=True)]
        low, high = interval(ratios)
        reached = "" if bar is None else "yes" if low >= bar else "NO" if high < bar else "not shown"
        rates = [f"{tokens / statistics.median(seen[side]):,.0f}" for side in ("ours", name)]
        ratio = f"**{statistics.median(ratios):.2f}x** ({low:.2f} to {high:.2f})"
        print(f"| {row.what} | {NAMES[name]} | {ratio} | {rates[0]} / {rates[1]} | {needed} | {reached} | {where()} |",
              flush=True)  # fmt: skip
    return seen


def memory_row(what: str, ours: int, theirs: int, bar: float) -> None:
    """Print our peak memory divided by the plain loop's."""
    ratio = ours / theirs
    reached = "yes" if ratio <= bar else "NO"
    sizes = f"{ours / 2**20:,.0f} / {theirs / 2**20:,.0f} MiB"
    print(f"| {what} | {NAMES['plain']} | **{ratio:.2f}x** | {sizes} | <= {bar}x | {reached} | {where()} |", flush=True)
