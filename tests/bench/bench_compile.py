"""Compares compiling each block by itself, as the trainer does, with compiling the network as one graph.

    python tests/bench/bench_compile.py [--rounds 5] [--steps 8] [--rows cold,speed]

`cold`: the processor time, child processes included, of a process's first step with an empty compile cache and one
thread, minus the time of its second step. Each measurement takes a new process, and the two ways take turns. `speed`:
steps of both ways in one process, in turn, from the same weights. Prints rows of a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import time

import torch

from tests.bench.contest import Ours, Row, interval, shards_of, where
from tests.bench.reference_loop import Shape

SHAPE = Shape(12, 6, 384, 128, 4096, 8, bias=True)
ROW = Row("12 layers x 384, 8 x 128 tokens, fp32", SHAPE, 8, {}, compiled=frozenset({"ours"}))
COLD_BAR, SPEED_BAR = 0.6, 0.97


def made(way: str, work: Path) -> Ours:
    """Return a trainer whose network is compiled block by block ("blocks") or as one graph ("whole")."""
    row = ROW if way == "blocks" else replace(ROW, compiled=frozenset())
    ours = Ours(row, shards_of(SHAPE, work).parent, Path(tempfile.mkdtemp(dir=work)))
    if way == "whole":
        ours.run.setup.gpt.hidden = torch.compile(ours.run.setup.gpt.hidden, dynamic=False)  # type: ignore[method-assign]
    return ours


def processor_s() -> float:
    """Return the processor seconds of this process and of the child processes that it has waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def first_step(way: str, work: Path) -> float:
    """Return by how many processor seconds the first step exceeds the second."""
    ours, spent = made(way, work), [processor_s()]
    for _ in range(2):
        ours.take()
        spent.append(processor_s())
    return spent[1] - spent[0] - (spent[2] - spent[1])


def cold(rounds: int, work: Path) -> None:
    seconds: dict[str, list[float]] = {"whole": [], "blocks": []}
    for number in range(rounds):
        for way in list(seconds)[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory() as cache:
                known = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
                argv = [sys.executable, __file__, "--alone", way, "--work", str(work)]
                done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=known)
            seconds[way].append(float(done.stdout.splitlines()[-1]))
    tell("cold compile, processor time", seconds["blocks"], seconds["whole"], COLD_BAR, "s", more_is_better=False)


def speed(rounds: int, steps: int, work: Path) -> None:
    loops = {way: made(way, work) for way in ("whole", "blocks")}
    weights = loops["whole"].run.setup.model.state_dict()
    loops["blocks"].run.setup.model.load_state_dict(weights)
    for loop in loops.values():
        loop.take()
    rates: dict[str, list[float]] = {way: [] for way in loops}
    for number in range(rounds):
        for way in list(loops)[:: 1 if number % 2 else -1]:
            step_s = statistics.median(loops[way].block(steps, time.process_time))
            rates[way].append(SHAPE.batch * SHAPE.context / step_s)
    tell("tokens a second, by processor time", rates["blocks"], rates["whole"], SPEED_BAR, "", more_is_better=True)


def tell(
    what: str, ours: list[float], theirs: list[float], bar: float, unit: str, *, more_is_better: bool
) -> None:  # fmt: skip
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = interval(ratios)
    reached = (low >= bar) if more_is_better else (high <= bar)
    figures = " / ".join(f"{statistics.median(each):,.1f} {unit}".strip() for each in (ours, theirs))
    print(
        f"| {what}, {ROW.what} | **{statistics.median(ratios):.2f}x** ({low:.2f} to {high:.2f}) | {figures} | {bar}x |"
        f" {'yes' if reached else 'not shown'} | {where()} |", flush=True,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", default="cold,speed")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.alone:
        print(first_step(given.alone, given.work))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-compile-") as folder:
        if "cold" in given.rows:
            cold(given.rounds, Path(folder))
        if "speed" in given.rows:
            speed(given.rounds, given.steps, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
