"""What a checkpoint is worth, computed again: `python -m trainer.replay OUT --data DATA`.

OUT is a run's out folder, of which the newest checkpoint is taken, or one file of weights in it. The validation loss
comes from the weights alone. With `--before STEP` the steps from that checkpoint of the same folder, or from 0, are
taken again, and all weights are compared. Prints one JSON line; exit codes: 0 computed, 2 refused. Nothing is
unpickled, and nothing is written but a folder of links that is gone afterwards.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import read_tensors
from trainer.distributed import Processes, choose_device
from trainer.errors import Refused, TrainerError
from trainer.evaluate import validation
from trainer.events import Reporter
from trainer.recipe import Recipe, RecipeError, parse_recipe
from trainer.recipe_file import completed
from trainer.run import Progress, Run, kind_of
from trainer.run_checkpoint import RunCheckpoint, open_run_checkpoint
from trainer.shards import sha256_of_file
from trainer.train import take_step

__all__ = ["main", "replay"]

_MOST_THREADS = 1024
_SUFFIXES = {"weights": "model.safetensors", "optimizer": "optim.safetensors", "state": "state.json"}


def replay(checkpoint: Path, data: Path, recipe: Path | None = None, before: int | None = None) -> dict[str, Any]:
    """Return the validation loss of a checkpoint, and how far its weights are from those that the steps give again.

    Refused where it is not sound, is of another recipe or other data than these, or a step cannot be taken.
    """
    opened = open_run_checkpoint(checkpoint, recipe)
    if opened.weights != _of_step(opened.weights, opened.state["step"]):
        raise Refused(f"the state beside {opened.weights.name} does not say that it is of that step")
    if type(threads := opened.state.get("threads")) is int and 1 <= threads <= _MOST_THREADS:
        torch.set_num_threads(threads)  # How many there are decides the order of sums on a CPU.
    run = _run_at(opened, opened.state["step"], data, recipe)
    told = {"step": opened.state["step"], "device": run.device.torch.type, "kind": kind_of(run.device)}
    found = validation(
        run.model, run.task.val_samples, run.task.eval_windows, run.plan.micro_batch,
        lengths=None, device=run.device, processes=run.processes, stopping=lambda: False,
    )  # fmt: skip
    told["val_loss"] = found.val_loss if found is not None and math.isfinite(found.val_loss) else None
    if before is not None:
        told["again"] = _steps_again(opened, before, data, recipe)
    return told


def _steps_again(opened: RunCheckpoint, before: int, data: Path, recipe: Path | None) -> dict[str, Any]:
    """Take the steps from the checkpoint of step `before`; `most` is the largest difference of a weight."""
    until = opened.state["step"]
    if not 0 <= before < until:
        raise Refused(f"step {before} is not before step {until}")
    run, losses = _run_at(opened, before, data, recipe), {}
    if run.recipe.train.loop != "own":
        raise Refused(f'train.loop "{run.recipe.train.loop}" is another library\'s, whose steps are not taken again')
    try:
        while run.progress.step < until:
            figures, _ = take_step(run)
            run.progress.step += 1
            losses[run.progress.step] = figures["loss"]
    finally:
        run.close_feed()
    kept, made = read_tensors(opened.weights), run.model.state_dict()
    most = max(float((kept[name].double() - made[name].cpu().double()).abs().max()) for name in made)
    is_equal = all(torch.equal(kept[name], made[name].cpu()) for name in made)
    return {"from": before, "equal": is_equal, "most": most if math.isfinite(most) else None, "losses": losses}


def _run_at(opened: RunCheckpoint, step: int, data: Path, recipe: Path | None) -> Run:
    """The run as it was after a step (0: as the seed drew it), in this process, silent, with no place to save in."""
    first = open_run_checkpoint(_of_step(opened.weights, step), recipe) if step else opened
    wanted, processes = _recipe_of(first), Processes()
    with tempfile.TemporaryDirectory(prefix="gpurun-replay-") as own:
        out = Path(own)
        if step:
            _lay_out(opened.weights, step, out)
        run = Run(
            wanted, (data, out), processes=processes, reporter=Reporter(out, is_first=False),
            device=choose_device(wanted.train.precision, 0, 1), stop_asked=threading.Event(), progress=Progress(),
        )  # fmt: skip
    if run.progress.step != step:
        raise Refused(f"these data begin at step {run.progress.step}, and not at step {step}")
    return run


def _recipe_of(opened: RunCheckpoint) -> Recipe:
    """The recipe that is to be believed, with the micro-batch that fitted there: it decides the order of the sums."""
    try:
        recipe = parse_recipe(completed(opened.state["recipe"]))
    except (RecipeError, TypeError, AttributeError) as error:
        raise Refused(f"its recipe is none: {error}") from error
    room = opened.state.get("room")
    fits = room.get("fits") if isinstance(room, dict) else None
    if type(fits) is int and 1 <= fits < recipe.train.micro_batch:
        recipe = replace(recipe, train=replace(recipe.train, micro_batch=fits))
    return recipe


def _of_step(weights: Path, step: int) -> Path:
    return weights.with_name(f"{step:06d}.{_SUFFIXES['weights']}")


def _lay_out(weights: Path, step: int, out: Path) -> None:
    """Make an out folder that has one checkpoint, by links."""
    (out / "checkpoints").mkdir()
    files = []
    for kind, suffix in _SUFFIXES.items():
        name, source = f"checkpoints/{step:06d}.{suffix}", weights.with_name(f"{step:06d}.{suffix}").absolute()
        if not source.is_file():
            raise Refused(f"{source.name} is not here")
        (out / name).symlink_to(source)
        entry = {"name": name, "bytes": source.stat().st_size, "sha256": sha256_of_file(source)}
        files.append(entry | {"kind": kind, "step": step})
    (out / "MANIFEST.json").write_text(json.dumps({"v": 1, "latest": step, "best": None, "files": files}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.replay", description="Compute a checkpoint's loss again.")
    parser.add_argument("checkpoint", type=Path, help="a run's out folder, or one NNNNNN.model.safetensors in it")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the shards that it was trained on")
    parser.add_argument("--recipe", type=Path, metavar="JSON", help="the recipe, in place of what the checkpoint says")
    parser.add_argument("--before", type=int, metavar="STEP", help="take the steps from this checkpoint again, too")
    given = parser.parse_args(arguments)
    try:
        print(json.dumps(replay(given.checkpoint, given.data, given.recipe, given.before)), flush=True)
    except TrainerError as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return Refused.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
