"""How many tokens the `modern` preset (with Muon and a trapezoid schedule) needs to reach the loss of `faithful`.

    python tests/bench/bench_presets.py [--steps 700] [--seeds 3] [--share 0.6] [--rates 1e-3,3e-3,1e-2] [--minutes M]

Both train with the real trainer on the same real text: the standard library's source, one token a character. Each
preset trains with every rate of the same small grid with the first seed; the rate with the lowest final validation loss
then trains with the other seeds. `modern` trains for `--share` of the tokens, its cool-down included. The result, seed
by seed, is the number of tokens at which the validation loss of `modern` (on a straight line between two evaluations)
comes down to the final loss of `faithful`, divided by all tokens of `faithful`. The bar is 0.6.

Trainings are kept in the work folder: a finished one is not repeated, an interrupted one continues from its last
checkpoint, and the same command trains the missing ones. Writes presets.json there, prints rows for
docs/dev/BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpurun.data.prepare import PrepareOrder, prepare
from tests.bench.recipes import measured_recipe
from trainer.recipe import Recipe

ROOT = Path(__file__).parents[2]
BAR = 0.6
LAYERS, HEADS, WIDTH, CONTEXT = 4, 4, 128, 128
SEQUENCES, MICRO_BATCH = 16, 16
EVALUATIONS, EVAL_TOKENS = 16, 16384
TEXT_BYTES = 12_000_000

Curve = list[tuple[int, float]]
"""(tokens, validation loss) of every evaluation."""


@dataclass(frozen=True)
class Trial:
    """One training, with all the settings in which it differs from the others of this comparison."""

    preset: str
    steps: int
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.preset}-{self.steps}-{self.rate:g}-{self.seed}"

    def recipe(self) -> Recipe:
        """Return the recipe; trials differ in the preset and in its head, biases, optimiser and schedule."""
        modern = self.preset == "modern"
        return measured_recipe(
            model={
                "preset": self.preset, "layers": LAYERS, "heads": HEADS, "width": WIDTH, "context": CONTEXT,
                "bias": not modern, "tied": not modern,
            },
            optim={"kind": "muon" if modern else "adamw", "lr": self.rate, "beta2": 0.99},
            schedule={
                "kind": "trapezoid" if modern else "cosine", "warmup_steps": self.steps // 20,
                "min_lr": 0.0 if modern else self.rate / 10, "cooldown_fraction": 0.5 if modern else 0.0,
            },
            train={
                "steps": self.steps, "batch_tokens": SEQUENCES * CONTEXT, "micro_batch": MICRO_BATCH,
                "seed": self.seed, "log_every": 50, "checkpoint_every": max(1, self.steps // 4),
            },
            evaluation={"every": max(1, self.steps // EVALUATIONS), "tokens": EVAL_TOKENS},
        )  # fmt: skip


class Lab:
    """A work folder with the shards and a folder for each trial, and the time after which no trial begins."""

    def __init__(self, work: Path, until_monotonic_s: float) -> None:
        self.work, self.until_monotonic_s = work, until_monotonic_s
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        work.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        prepare(PrepareOrder("stdlib", "char", self.work / "data", limit_bytes=TEXT_BYTES), lambda _: None)

    def command(self, module: str, *words: str) -> None:
        argv = [sys.executable, "-m", module, *words]
        subprocess.run(argv, cwd=ROOT, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def curve(self, trial: Trial) -> Curve | None:
        """Return the trial's curve; train first if it is missing. None if the time for new trials is over."""
        folder = self.work / trial.name
        found = read_curve(folder, trial.steps)
        if found is None:
            if time.monotonic() > self.until_monotonic_s:
                return None
            began = time.monotonic()
            folder.mkdir(exist_ok=True)
            recipe = folder / "recipe.json"
            recipe.write_text(json.dumps(trial.recipe().as_record()))
            out = ["--data", str(self.work / "data"), "--out", str(folder)]
            self.command("trainer.train", "--recipe", str(recipe), *out)
            found = read_curve(folder, trial.steps)
            assert found is not None
            print(f"{trial.name}: {found[-1][1]:.4f} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
        return found


def read_curve(folder: Path, steps: int) -> Curve | None:
    """Return a trial's evaluations, one per step; None if the last one is missing."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    losses = {event["step"]: event["val_loss"] for event in events if event["kind"] == "eval"}
    return [(step * SEQUENCES * CONTEXT, losses[step]) for step in sorted(losses)] if steps in losses else None


def tokens_to(loss: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """Return the tokens after which a curve stays at or below a loss, on straight lines; None if it ends above it."""
    above = max((place for place, (_, value) in enumerate(curve) if value > loss), default=-1)
    if above == len(curve) - 1:
        return None
    if above < 0:
        return float(curve[0][0])
    (tokens, value), (next_tokens, next_value) = curve[above : above + 2]
    return tokens + (next_tokens - tokens) * (value - loss) / (value - next_value)


def best_rate(lab: Lab, preset: str, steps: int, rates: Sequence[float]) -> float | None:
    """Train the grid with the first seed; return the rate with the lowest final loss, or None if the time ran out."""
    curves = {rate: lab.curve(Trial(preset, steps, rate, 1)) for rate in rates}
    done = {rate: curve[-1][1] for rate, curve in curves.items() if curve}
    return min(done, key=lambda rate: done[rate]) if len(done) == len(rates) else None


def compare(lab: Lab, steps: int, share: float, rates: Sequence[float], seeds: int) -> dict[str, object] | None:
    """Train the missing trials and return the findings; None if the time ran out before the grids were done."""
    lengths = {"faithful": steps, "modern": round(share * steps)}
    chosen = {preset: best_rate(lab, preset, length, rates) for preset, length in lengths.items()}
    if None in chosen.values():
        return None
    pairs = []
    for seed in range(1, seeds + 1):
        faithful, modern = (lab.curve(Trial(p, lengths[p], chosen[p] or 0.0, seed)) for p in ("faithful", "modern"))
        if faithful and modern:
            reached = tokens_to(faithful[-1][1], modern)
            ratio = None if reached is None else reached / faithful[-1][0]
            pairs.append({"seed": seed, "ratio": ratio, "faithful": faithful, "modern": modern})
    grid = {p: {f"{r:g}": (lab.curve(Trial(p, lengths[p], r, 1)) or [])[-1][1] for r in rates} for p in lengths}
    return {"steps": lengths, "rates": chosen, "grid": grid, "tokens_per_step": SEQUENCES * CONTEXT, "pairs": pairs}


def show(found: dict[str, object], seeds: int, share: float) -> None:
    """Print rows for docs/dev/BENCHMARKS.md: the ratio of each seed, then the median and spread."""
    pairs: list[dict[str, object]] = found["pairs"]  # type: ignore[assignment]
    rates: dict[str, float] = found["rates"]  # type: ignore[assignment]
    date = f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores"
    print("| seed | faithful ends at | modern ends at | modern reaches faithful's end after |")
    print("| --- | --- | --- | --- |")
    for pair in pairs:
        ends = [pair[name][-1] for name in ("faithful", "modern")]  # type: ignore[index]
        ratio = pair["ratio"]
        reached = "never" if ratio is None else f"**{ratio:.2f}x**"
        cells = [f"{loss:.3f} ({tokens / 1e6:.2f} M tokens)" for tokens, loss in ends]
        print(f"| {pair['seed']} | {cells[0]} | {cells[1]} | {reached} |")
    ratios = [float(pair["ratio"]) for pair in pairs if pair["ratio"] is not None]  # type: ignore[arg-type]
    spread = f"median {statistics.median(ratios):.2f}x, {min(ratios):.2f}x to {max(ratios):.2f}x" if ratios else "none"
    whole = len(ratios) == len(pairs) == seeds
    verdict = "yes" if whole and max(ratios) <= BAR else "NO" if len(pairs) == seeds else "not all seeds measured"
    print(f"\n{spread} over {len(pairs)} seeds, bar <= {BAR}x: {verdict} ({date}; modern trained for {share:g}x of the "
          f"tokens; rates {rates['faithful']:g} and {rates['modern']:g})")  # fmt: skip
    print(f"grid, seed 1, final validation loss: {json.dumps(found['grid'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=700, help="of faithful, 2048 tokens each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=BAR, help="how many of faithful's tokens modern trains for")
    parser.add_argument(
        "--rates", type=lambda text: [float(word) for word in text.split(",")], default=[1e-3, 3e-3, 1e-2]
    )
    parser.add_argument("--minutes", type=float, default=120.0, help="after these no trial is begun")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench-presets")
    given = parser.parse_args()
    lab = Lab(given.work.absolute(), time.monotonic() + 60 * given.minutes)
    lab.prepare()
    found = compare(lab, given.steps, given.share, given.rates, given.seeds)
    if found is None:
        print("the grids are not done; the same command goes on with them")
        return 1
    (lab.work / "presets.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found, given.seeds, given.share)
    return 0


if __name__ == "__main__":
    sys.exit(main())
