"""How close learners' weights come to a teacher's replay, and how close they are to a replay from another seed.

    python tests/bench/bench_class.py [--learners 30] [--recipe course-lab] [--python PATH ...]

Each learner trains the recipe from a seed of their own, with a different number of threads, CPU instruction set,
precision and Python (each Python brings its own release of torch). The teacher replays the training here from that
seed, in fp32, as `gpurun audit --replay` does. Then the same weights are compared with a replay from a classmate's
seed, as if a forger had copied them. Prints the table of docs/RECEIPTS.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from gpurun.core.installed_files import recipe_file  # noqa: E402
from gpurun.data.prepare import PrepareOrder, prepare  # noqa: E402
from gpurun.jobs.training.recipe import load_recipe, resolve  # noqa: E402

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows "
KINDS = list(product(("default", "avx2", "avx512"), ("1", "2", "3"), ("fp32", "bf16")))


def ran(module: str, *words: str, python: str = sys.executable, **environment: str) -> str:
    """Run a module of the trainer as a program, assert that it succeeds, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [python, "-m", module, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    return done.stdout


def torch_of(python: str) -> str:
    """Return the torch release that a Python interpreter imports."""
    return subprocess.check_output([python, "-c", "import torch; print(torch.__version__)"], text=True).strip()


def replayed(out: Path, data: Path, recipe: dict[str, Any], steps: int) -> dict[str, Any]:
    """Write the recipe into all state files, as a forger would; replay all steps and return the replay's JSON."""
    manifest = json.loads((out / "MANIFEST.json").read_bytes())
    for file in manifest["files"]:
        path = out / file["name"]
        if file["kind"] == "state":
            path.write_text(json.dumps({**json.loads(path.read_bytes()), "recipe": recipe}))
            file |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (out / "MANIFEST.json").write_text(json.dumps(manifest))
    answer: dict[str, Any] = json.loads(ran("trainer.replay", str(out), "--data", str(data), "--again", f"0:{steps}"))
    return answer


def main() -> None:
    """Train every learner and print how close the honest and the forged weights are to the replay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--learners", type=int, default=30)
    parser.add_argument("--recipe", default="course-lab")
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    given = parser.parse_args()
    releases = [torch_of(python) for python in given.python]
    honest, forged, equal, losses = list[float](), list[float](), 0, list[float]()
    with tempfile.TemporaryDirectory() as own:
        work = Path(own)
        (work / "text.txt").write_text(TEXT * 3)
        base = resolve(load_recipe(given.recipe), "full").record
        table, base["sample"] = base["data"], {**base["sample"], "prompts": []}
        prepare(
            PrepareOrder(str(work / "text.txt"), table["tokenizer"], work / "data", val_fraction=table["val_fraction"]),
            lambda _: None,
        )
        steps = base["train"]["steps"]
        for number in range(given.learners):
            later, turn = divmod(number, len(given.python))
            capability, threads, precision = KINDS[5 * later % len(KINDS)]
            seed, other = (recipe_file.seed_of(f"learner-{learner}:key") for learner in (number, number + 1))
            recipe = {**base, "train": {**base["train"], "seed": seed, "precision": precision}}
            out = work / f"out-{number}"
            out.mkdir()
            (out / "recipe.json").write_text(json.dumps(recipe))
            words = ("--recipe", str(out / "recipe.json"), "--data", str(work / "data"), "--out", str(out))
            python, narrow = given.python[turn], {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": threads}
            ran("trainer.train", *words, python=python, **narrow)
            claimed = {**recipe, "train": {**recipe["train"], "precision": "auto"}}
            answer = replayed(out, work / "data", claimed, steps)
            (again,) = answer["again"]
            events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
            said = [event["val_loss"] for event in events if event["kind"] == "eval"][-1]
            honest.append(again["alike"])
            equal += again["equal"]
            losses.append(abs(answer["val_loss"] / said - 1))
            claimed["train"]["seed"] = other
            (again,) = replayed(out, work / "data", claimed, steps)["again"]
            forged.append(again["alike"])
            print(f"{number:3} {capability:8} {threads} {precision} torch {releases[turn]}  honest {honest[-1]:.4f}  "
                  f"forged {forged[-1]:.4f}  val_loss apart {losses[-1]:.1e}", flush=True)  # fmt: skip
    print(f"\n{given.recipe}, {given.learners} learners, {steps} steps; {equal} bit for bit the same")
    for name, values in (("honest", honest), ("another seed", forged)):
        middle = statistics.median(values)
        print(f"{name}: cosine {min(values):.3f} to {max(values):.3f}, median {middle:.3f}")
    print(f"val_loss apart: {max(losses):.1e} at most")


if __name__ == "__main__":
    main()
