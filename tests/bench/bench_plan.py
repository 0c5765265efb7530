"""The plan's memory formula, its speed, and its estimate of a run's time after fifty steps: run by `make bench-plan`.

    python tests/bench/bench_plan.py [--rows memory,plan,time] [--repeats 3] [--cpu-time]

`memory`: compares the formula with torch's MemTracker on the real step (tests/traced_memory.py), over models from 0.1M
to 1.5B, the presets, batches, chunked and whole logits, dropout, precisions, portions, replicas, shares and Muon, and
shows the largest error of each group in both directions. `plan`: the median processor time to judge and rank forty
offers of the catalogue, and the median time of the whole command with the interpreter's start. `time`: runs of the real
trainer on this machine; compares the total time estimated at the fiftieth step with the time the run took. Prints rows
for docs/dev/BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from gpurun.core.money import parse_usd
from gpurun.core.trainer_events import events_of
from gpurun.jobs.training.memory import tensor_bytes
from gpurun.jobs.training.recipe import ModelConfig, load_recipe, resolve
from gpurun.jobs.training.throughput import Meter
from gpurun.planning.budget import candidates
from gpurun.planning.transfer import estimate_load
from gpurun.providers.catalog import all_offers

MODERN: dict[str, Any] = {"preset": "modern", "bias": False, "tied": False}
SIZES = {  # layers, width, context, vocabulary
    "0.1M": (2, 64, 64, 128),
    "0.8M": (4, 128, 64, 65),
    "10.6M": (6, 384, 256, 65),
    "12M": (6, 192, 256, 50304),
    "124M": (12, 768, 1024, 50304),
}
WIDE = {"10.6M": SIZES["10.6M"], "12M": SIZES["12M"], "4 layers of 124M": (4, 768, 1024, 50304)}
LARGE = {"355M": (24, 1024, 1024, 50304), "774M": (36, 1280, 1024, 50304), "1.5B": (48, 1600, 1024, 50304)}
PLAIN: dict[str, Any] = {"chunked": False}
ON_CPU: list[dict[str, Any]] = [{"on_cpu": True, "precision": "fp32"}]
SHARES: list[dict[str, Any]] = [
    {"shared": True, "processes": count, "accumulation": portions} for count in (2, 8) for portions in (1, 4)
]
GROUPS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "faithful, 0.1M to 124M": ({}, [{}]),
    "modern, 0.1M to 124M, AdamW and Muon": (MODERN, [{}, {"optim": "muon"}]),
    "dropout": ({"dropout": 0.1}, [{}]),
    "whole logits": ({}, [PLAIN]),
    "fp32, fp16": ({}, [{"precision": "fp32"}, {"precision": "fp16"}]),
    "encoder-decoder, bf16 and fp32": ({"preset": "encoder-decoder", "dropout": 0.1}, [{}, {"precision": "fp32"}]),
    "dropout on a CPU": ({"dropout": 0.1}, ON_CPU),
    "modern with dropout on a CPU": ({**MODERN, "dropout": 0.1}, ON_CPU),
    "encoder-decoder on a CPU": ({"preset": "encoder-decoder", "dropout": 0.1}, ON_CPU),
    "in portions, replicas": ({}, [{"accumulation": 2}, {"processes": 2}]),
    "shares of 2 and of 8 (FSDP2)": ({}, SHARES),
    "modern in shares, AdamW and Muon": (MODERN, [*SHARES, {**SHARES[0], "optim": "muon"}]),
}
BATCHES = (1, 8)
PLAN_ROUNDS = 21
PLAN_COMMANDS = 12  # The first command writes the bytecode and is not counted.
GPURUN = str(Path(sys.executable).with_name("gpurun"))
_SHAKESPEARE = ["shakespeare-char", "model.layers=4", "model.width=128", "model.heads=4", "model.context=128"]
# Runs of a minute or more, because a second of 20 ms steps shows little on a machine that other programs share.
RUNS = {
    "mini-gpt's rehearsal (0.1M), 2,500 steps": ["mini-gpt", "train.steps=2500"],
    "modern-124m's rehearsal (Muon), 1,500 steps": ["modern-124m", "train.steps=1500"],
    "the same with 4 layers x 128 and 8,192 tokens a step, 240 steps": [
        "modern-124m",
        "model.layers=4",
        "model.width=128",
        "train.steps=240",
        "train.batch_tokens=8192",
        "train.micro_batch=128",
    ],
    "shakespeare-char with 4 layers x 128, 8,192 tokens a step, 240 steps": [
        *_SHAKESPEARE,
        "train.steps=240",
        "train.batch_tokens=8192",
        "train.micro_batch=64",
    ],
    "the same, 40,960 tokens a step, 120 steps": [
        *_SHAKESPEARE,
        "train.steps=120",
        "train.batch_tokens=40960",
        "train.micro_batch=64",
    ],
}
ROOT = Path(__file__).parents[2]
_BY_PROCESSOR = """
import runpy, sys, time
time.monotonic = time.perf_counter = time.process_time
sys.argv[0] = "trainer.train"
runpy.run_module("trainer.train", run_name="__main__", alter_sys=True)
"""


def where() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores"


def memory() -> None:
    """Print the smallest, largest and median error of each group."""
    import torch

    from tests.traced_memory import traced_peak_bytes, way_of

    print("| what | points | formula over MemTracker | bar | reached | date, machine |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name, points in _points():
        errors = []
        for model, batch, options in points:
            traced = traced_peak_bytes(model, batch, **options)
            errors.append(tensor_bytes(ModelConfig(**model), batch, way=way_of(**options)) / traced - 1)
            print(f"{name}: {model} x {batch} {options}: {traced:,} {errors[-1]:+.2%}", file=sys.stderr, flush=True)
        reached = "yes" if max(map(abs, errors)) <= 0.05 else "NO"
        found = f"{min(errors):+.2%} to {max(errors):+.2%}, median {statistics.median(errors):+.2%}"
        print(
            f"| {name} | {len(errors)} | {found} | 5 % | {reached} | {where()}, torch {torch.__version__} |", flush=True
        )


def _points() -> Iterator[tuple[str, list[tuple[dict[str, Any], int, dict[str, Any]]]]]:
    for name, (more, variants) in GROUPS.items():
        sizes = SIZES if "124M" in name else WIDE
        yield name, [(_shape(s, more), b, options) for s in sizes.values() for b in BATCHES for options in variants]
    yield "modern with Muon, 355M", [(_shape(LARGE["355M"], MODERN), 8, {"optim": "muon"})]
    for name, size in LARGE.items():
        yield f"faithful, {name}", [(_shape(size, {}), batch, {}) for batch in BATCHES]
    yield "1.5B in shares", [(_shape(LARGE["1.5B"], {}), batch, options) for batch in BATCHES for options in SHARES]


def _shape(size: tuple[int, ...], more: dict[str, Any]) -> dict[str, Any]:
    layers, width, context, vocab_size = size
    heads = max(1, width // 64)
    return {"layers": layers, "heads": heads, "width": width, "context": context, "vocab_size": vocab_size, **more}


def plan() -> None:
    """Print how long planning takes, alone and as a whole command."""
    offers = [offer for offer in all_offers() if offer.gpu_count][:40]
    took = []
    for _ in range(PLAN_ROUNDS):
        began = time.process_time()
        full = resolve(load_recipe("gpt2-124m"), "full")
        candidates(offers, full, estimate_load(full, 50_000_000), cap=parse_usd("25"))
        took.append(time.process_time() - began)
    each_ms = 1000 * statistics.median(took)
    print(f"| the recipe read, 40 offers judged and ranked | {each_ms:.0f} ms | 300 ms | {where()} |")
    for first, words in (("sys.modules['keyring'] = None", "without the extra keyring"), ("pass", "with it")):
        print(f"| `gpurun plan gpt2-124m --max-cost 25`, {words} | {_whole_ms(first):.0f} ms | 300 ms | {where()} |")


def _whole_ms(first: str) -> float:
    """Return the median milliseconds of the whole command, with the interpreter and imports, its bytecode cached."""
    code = f"import sys; {first}; from gpurun.__main__ import main; main()"
    argv, took = [sys.executable, "-c", code, "plan", "gpt2-124m", "--max-cost", "25"], list[float]()
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as home:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"GPURUN_HOME": home, "PYTHONPYCACHEPREFIX": f"{home}/bytecode"}
        for _ in range(PLAN_COMMANDS):
            began = time.perf_counter()
            subprocess.run(argv, check=True, capture_output=True, env=environment, cwd=ROOT)
            took.append(time.perf_counter() - began)
    return 1000 * statistics.median(took[1:])


def times(repeats: int, cpu_time: bool) -> None:
    """Print by how much the total time estimated at the fiftieth step differs from the time the run really took."""
    for what, (recipe, *keys) in RUNS.items():
        found = [_told_over_took(recipe, keys, cpu_time) for _ in range(repeats)]
        shown = ", ".join(f"{ratio - 1:+.1%}" for ratio in found)
        clock = "processor time, one thread" if cpu_time else "wall time"
        print(f"| {what} | {shown} | 5 % | {where()}, {clock}, load {os.getloadavg()[0]:.0f} |", flush=True)


def _told_over_took(recipe: str, keys: list[str], cpu_time: bool) -> float:
    """Run the real command; return the estimated over the real total time. With `cpu_time`, that run takes 20 steps to
    make the data, and the trainer then runs again with processor time as its clock."""
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as home:
        steps = [] if not cpu_time else ["--set", "train.steps=20"]
        sets = [word for key in keys for word in ("--set", key)]
        command = [GPURUN, "train", recipe, *sets, *steps, "--dry-run", "--json"]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "GPURUN_HOME": home})
        run = next((Path(home) / "runs").iterdir())
        resolved = json.loads((run / "plan.json").read_text())["resolved"]
        if not cpu_time:
            return _ratio(resolved, run / "events.jsonl")
        changes = tomllib.loads("\n".join(keys))["train"]  # The run that made the data took 20 steps.
        resolved["train"].update(changes)
        (run / "recipe.json").write_text(json.dumps(resolved))
        paths = ["--recipe", str(run / "recipe.json"), "--data", str(run / "data"), "--out", str(run / "out")]
        argv = [sys.executable, "-c", _BY_PROCESSOR, *paths]
        subprocess.run(argv, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return _ratio(resolved, run / "out" / "events.jsonl")


def _ratio(resolved: dict[str, Any], file: Path) -> float:
    meter = Meter(resolved)
    events = list(events_of(file))
    progress = next(found for event in events if (found := meter.take(event)) is not None)
    return float((progress.elapsed_s + progress.left_s) / (events[-1].elapsed_s or 0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="memory,plan,time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    rows = {"memory": memory, "plan": plan, "time": lambda: times(given.repeats, given.cpu_time)}
    for key in given.rows.split(","):
        rows[key]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
