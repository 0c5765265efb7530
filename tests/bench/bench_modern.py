"""Measures what each addition to `modern-124m` gains, at a size that a CPU can train: three seeds, compared in pairs.

    python tests/bench/bench_modern.py [--rates 0.5,1,2,4] [--seeds 3] [--only NAME,…] [--workers 2]

All variants train with the real loop and the keys of recipes/modern-124m.toml, made smaller, on the standard library's
source with one token a character. `reference` is the recipe itself; each other variant makes the change that its name
states. Every variant trains with all its learning rates multiplied by each of --rates. The result is the last
validation loss minus that of the reference at its best rate, seed by seed, and how many standard errors of the mean the
difference is away from zero. An addition that wins by three standard errors belongs in the recipe. Finished trainings
stay in the work folder, and the same command trains only the missing ones. Prints the table of docs/MODERN.md.
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

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpurun.data.prepare import PrepareOrder, prepare
from trainer.recipe_file import read_recipe

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "modern-124m.toml"
STEPS = 200
HEAD_PAIRS = 8
"""Rotated pairs of channels in a head: half of its 32 channels. `rotary_base` below is chosen so that the slowest
pair turns by 1/1024 a position, as in the recipe."""
SMALL = (
    "model.layers=4", "model.heads=3", "model.width=96", "model.context=64",
    f"model.rotary_base={1024 ** (HEAD_PAIRS / (HEAD_PAIRS - 1))}",
    "data.source=stdlib", "data.tokenizer=char", "data.order=permuted", "eval.order=permuted",
    f"train.steps={STEPS}", "train.batch_tokens=1024", "train.micro_batch=16", f"train.checkpoint_every={STEPS}",
    "train.compile=false", f"eval.every={STEPS}", "eval.tokens=65536", "sample.prompts=[]",
    "hardware.on_cpu=as_written",
)  # fmt: skip
RATES = ("lr", "muon_lr", "embed_lr", "gain_lr")
ADDITIONS: dict[str, tuple[str, ...]] = {
    "reference": (),
    "cautious": ("cautious=true",),
    "polar-express": ("orthogonal=polar-express",),
    "five iterations": ("orthogonal=newton-schulz",),
    "value_mix": ("value_mix=true",),
    "momentum warm-up": (f"muon_momentum_warmup={STEPS // 4}",),
    "head_lr x2": ("head_lr=8e-3",),
    "tanh": ("softcap_by=tanh",),
    "all channels turn": ("model.rotary=1",),
    "no gains or biases": ("gains=false", "model.bias=false"),
    "bf16": ("precision=bf16",),
    "bf16 and its stream": ("precision=bf16", "stream=bf16"),
    "before": (
        "gains=false", "model.bias=false", "init_gain=1", "attention_scale=0", "rotary_base=10000", "softcap_by=tanh",
        "value_mix=true", "cautious=true", "orthogonal=polar-express", "muon_scale=adamw", "grad_clip=1", "eps=1e-10",
        "embed_weight_decay=0", "gain_weight_decay=0", f"muon_lr={4.5e-3 * math.sqrt(768 / 96)}",
        f"muon_weight_decay={0.28 / math.sqrt(768 / 96)}",
    ),
}  # fmt: skip
"""The changes to the recipe, by name. The others are compared with the first; the last is the recipe as it once was."""


def trained(work: Path, name: str, rate: float, seed: int) -> float:
    """Return the last validation loss of one training; train first unless the work folder has the result."""
    out = work / f"{name.replace(' ', '-')}-{rate:g}-{seed}"
    if (loss := last_loss(out)) is not None:
        return loss
    out.mkdir(parents=True, exist_ok=True)
    words = [*SMALL, f"train.seed={seed}", *ADDITIONS[name]]
    optim = read_recipe(RECIPE, overrides=words).optim
    words += [f"optim.{key}={rate * getattr(optim, key)}" for key in RATES if rate != 1 and getattr(optim, key)]
    words += [f"optim.head_lr={rate * optim.head_lr}"] if optim.head_lr and rate != 1 else []
    (out / "recipe.json").write_text(json.dumps(read_recipe(RECIPE, overrides=words).as_record()))
    import torch

    from trainer.train import main as train

    torch.set_num_threads(1)
    arguments = ["--recipe", str(out / "recipe.json"), "--data", str(work / "data"), "--out", str(out)]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        assert train(arguments) == 0
    loss = last_loss(out)
    assert loss is not None
    return loss


def last_loss(out: Path) -> float | None:
    """Return the validation loss after the last step; None if the training has not reached it."""
    path = out / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return next((event["val_loss"] for event in events if event["kind"] == "eval" and event["step"] == STEPS), None)


def row(name: str, rate: float, losses: list[float], against: list[float]) -> str:
    """Return a table row: the mean, its difference from the reference at its best rate, and that in standard errors."""
    mean, spread = statistics.mean(losses), statistics.stdev(losses)
    if losses is against:
        return f"| {name} | {rate:g} | {mean:.4f} | {spread:.4f} | | |"
    pairs = [loss - other for loss, other in zip(losses, against, strict=True)]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    sigma = statistics.mean(pairs) / error if error else 0.0
    difference = f"{statistics.mean(pairs):+.4f} ± {error:.4f}"
    return f"| {name} | {rate:g} | {mean:.4f} | {spread:.4f} | {difference} | {sigma:+.1f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="0.5,1,2,4", help="by which all of a recipe's rates are multiplied")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(ADDITIONS), help="names of additions, with commas between")
    parser.add_argument("--workers", type=int, default=2, help="trainings at once, of one thread each")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench-modern")
    given = parser.parse_args()
    work, names = given.work.absolute(), given.only.split(",")
    work.mkdir(parents=True, exist_ok=True)
    prepare(PrepareOrder("stdlib", "char", work / "data", limit_bytes=12_000_000), lambda _: None)
    rates, seeds = [float(rate) for rate in given.rates.split(",")], range(1, given.seeds + 1)
    wanted = [(name, rate, seed) for name in names for rate in rates for seed in seeds]
    # Each training needs a new process, because the loop sets up signals, threads and the garbage collector.
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = {key: pool.submit(trained, work, *key) for key in wanted}
    found = {(name, rate): [runs[name, rate, seed].result() for seed in seeds] for name, rate, _ in wanted}
    print("| addition | rates x | validation loss | spread | less than the reference | sigma |")
    print("| --- | --- | --- | --- | --- | --- |")
    best = min((key for key in found if key[0] == names[0]), key=lambda key: statistics.mean(found[key]))
    for (name, rate), losses in found.items():
        print(row(name, rate, losses, found[best]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
