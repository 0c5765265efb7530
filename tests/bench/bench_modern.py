"""What each ingredient of `modern` gives by itself, at a size that a CPU trains: three seeds each, paired.

    python tests/bench/bench_modern.py [--steps 300] [--seeds 3] [--only NAME,…] [--workers 2]

All train by the real loop on the standard library's source, one token a character, from the same seeds. What counts is
the last validation loss less that of `modern` as its recipe is without the ingredient, seed by seed, and how many
standard errors of the mean that is away from nothing. One that pays by two is for the recipe. Runs stay in the work
folder, and the same command goes on with the rest. Prints the table of docs/MODERN.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpurun.data.prepare import Order, prepare
from tests.bench.recipes import measured_recipe

ROOT = Path(__file__).parents[2]
MODEL = {"preset": "modern", "layers": 4, "heads": 2, "width": 64, "context": 64, "bias": False, "tied": False}
OPTIM = {"kind": "muon", "lr": 5e-3}
INGREDIENTS: dict[str, dict[str, dict[str, Any]]] = {
    "modern": {},
    "embed_lr x3": {"optim": {"embed_lr": 1.5e-2}},
    "head_lr /3": {"optim": {"head_lr": 1.7e-3}},
    "head_lr x2": {"optim": {"head_lr": 1e-2}},
    "muon_weight_decay 0.3": {"optim": {"muon_weight_decay": 0.3}},
    "cautious": {"optim": {"cautious": True}},
    "cautious + muon_weight_decay 0.3": {"optim": {"cautious": True, "muon_weight_decay": 0.3}},
    "polar-express": {"optim": {"orthogonal": "polar-express"}},
    "beta1 0.8": {"optim": {"beta1": 0.8}},
    "softcap 15": {"model": {"softcap": 15.0}},
    "rotary 0.5": {"model": {"rotary": 0.5}},
    "value_mix": {"model": {"value_mix": True}},
}
"""What is changed, by name; the first is what the others are held against."""


def trained(work: Path, name: str, seed: int, steps: int) -> float:
    """The last validation loss of one training, which is done now if it is not there."""
    out = work / f"{name.replace(' ', '-').replace('/', 'by')}-{steps}-{seed}"
    if (loss := last_loss(out, steps)) is not None:
        return loss
    out.mkdir(parents=True, exist_ok=True)
    changed = INGREDIENTS[name]
    recipe = measured_recipe(
        model=MODEL | changed.get("model", {}),
        optim=OPTIM | changed.get("optim", {}),
        schedule={"kind": "trapezoid", "warmup_steps": steps // 20, "cooldown_fraction": 0.5},
        train={"steps": steps, "batch_tokens": 1024, "micro_batch": 16, "seed": seed, "checkpoint_every": steps},
        evaluation={"every": steps, "tokens": 65536},
    )
    (out / "recipe.json").write_text(json.dumps(recipe.as_record()))
    import torch

    from trainer.train import main as train

    torch.set_num_threads(1)
    words = ["--recipe", str(out / "recipe.json"), "--data", str(work / "data"), "--out", str(out)]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        assert train(words) == 0
    loss = last_loss(out, steps)
    assert loss is not None
    return loss


def last_loss(out: Path, steps: int) -> float | None:
    """What the evaluation after the last step found; None where it was not reached."""
    path = out / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return next((one["val_loss"] for one in events if one["kind"] == "eval" and one["step"] == steps), None)


def row(name: str, losses: list[float], against: list[float]) -> str:
    """One row of the table: the mean, its difference from the first and how sure that is."""
    mean, spread = statistics.mean(losses), statistics.stdev(losses)
    if losses is against:
        return f"| {name} | {mean:.4f} | {spread:.4f} | | |"
    pairs = [one - other for one, other in zip(losses, against, strict=True)]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    sigma = statistics.mean(pairs) / error if error else 0.0
    return f"| {name} | {mean:.4f} | {spread:.4f} | {statistics.mean(pairs):+.4f} ± {error:.4f} | {sigma:+.1f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of 1024 tokens each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(INGREDIENTS), help="names of ingredients, with commas between")
    parser.add_argument("--workers", type=int, default=2, help="trainings at once, of one thread each")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench-modern")
    given = parser.parse_args()
    work, names = given.work.absolute(), list(INGREDIENTS)
    work.mkdir(parents=True, exist_ok=True)
    prepare(Order("stdlib", "char", work / "data", limit_bytes=12_000_000), lambda _: None)
    names = [name for name in names if name in given.only.split(",") or name == names[0]]
    seeds = range(1, given.seeds + 1)
    # Each training has a process of its own: the loop sets up signals, threads and the garbage collector for itself.
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = {(name, seed): pool.submit(trained, work, name, seed, given.steps) for seed in seeds for name in names}
    found = {name: [runs[name, seed].result() for seed in seeds] for name in names}
    print("| ingredient | validation loss | spread | less than without it | sigma |\n| --- | --- | --- | --- | --- |")
    for name, losses in found.items():
        print(row(name, losses, found[names[0]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
