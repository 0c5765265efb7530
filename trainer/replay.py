"""Recomputes what a checkpoint claims: `python -m trainer.replay OUT --data DATA`.

OUT is a run's out folder, whose newest checkpoint is used, or one file of weights in it. The validation loss is
computed from the weights alone. With `--again FROM:TO`, the steps from FROM to TO are repeated, beginning at the
checkpoint of step FROM in the same folder, or at 0. If the folder has a checkpoint of step TO, its weights are compared
with the result: whether they are `equal`, their largest difference (`most`), and how `alike` they moved from step FROM
(the cosine of the two changes). The command prints one JSON line. Exit codes: 0 computed, 2 refused. Nothing is
unpickled; only a folder of links is written, and removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint import read_tensors
from trainer.distributed import Processes, choose_device
from trainer.errors import Refused, TrainerError
from trainer.evaluate import validation
from trainer.events import Reporter
from trainer.recipe import Recipe, RecipeError, parse_recipe
from trainer.recipe_file import completed
from trainer.run import TrainingRun, machine_kind
from trainer.run_checkpoint import RunCheckpoint, open_run_checkpoint
from trainer.shards import sha256_of_file
from trainer.start import open_run
from trainer.train import take_step

__all__ = ["main", "replay_steps"]

_MOST_THREADS = 1024
_SUFFIXES = {"weights": "model.safetensors", "optimizer": "optim.safetensors", "state": "state.json"}


def replay_steps(
    checkpoint: Path, data: Path, recipe: Path | None = None, again: Iterable[tuple[int, int]] = ()
) -> dict[str, Any]:
    """Return the validation loss of a checkpoint, and the result of repeating each span of steps.

    Refused if the checkpoint is invalid or belongs to other data, or a step cannot be repeated.
    """
    opened = open_run_checkpoint(checkpoint, recipe)
    if opened.weights != _of_step(opened.weights, opened.state["step"]):
        raise Refused(f"the state beside {opened.weights.name} is not of that step")
    if type(threads := opened.state.get("threads")) is int and 1 <= threads <= _MOST_THREADS:
        torch.set_num_threads(threads)  # Their number decides the order of sums on a CPU.
    setup, state, _ = _run_at(opened, opened.state["step"], data, recipe)
    record = {"step": opened.state["step"], "device": setup.device.torch.type, "kind": machine_kind(setup.device)}
    found = validation(
        setup.model, setup.task.val_samples, setup.task.eval_windows, state.plan.micro_batch,
        lengths=None, device=setup.device, processes=setup.processes, stopping=lambda: False,
    )  # fmt: skip
    record["val_loss"] = found.val_loss if found is not None and math.isfinite(found.val_loss) else None
    record["again"] = [_steps_again(opened, span, data, recipe) for span in again]
    return record


def _steps_again(opened: RunCheckpoint, span: tuple[int, int], data: Path, recipe: Path | None) -> dict[str, Any]:
    """Repeat a span of steps; in the result, `most` is the largest difference of a weight; None if not compared."""
    first, until = span
    if not 0 <= first < until <= opened.state["step"]:
        raise Refused(f"steps {first} to {until} are not before step {opened.state['step']}")
    setup, state, io = _run_at(opened, first, data, recipe)
    losses, begun = {}, _weights_of(setup.model)
    if setup.recipe.train.loop != "own":
        raise Refused(f'train.loop "{setup.recipe.train.loop}" is another library\'s, whose steps cannot be repeated')
    try:
        while state.step < until:
            figures, _ = take_step(setup, state, io)
            state.step += 1
            losses[state.step] = figures["loss"]
    finally:
        io.close_feed()
    record = {"from": first, "to": until, "equal": None, "most": None, "alike": None, "losses": losses}
    if not (weights := _of_step(opened.weights, until)).is_file():
        return record
    kept, made = read_tensors(weights), _weights_of(setup.model)
    if {name: tensor.shape for name, tensor in kept.items()} != {name: tensor.shape for name, tensor in made.items()}:
        raise Refused(f"{weights.name} has other tensors than its recipe's model")
    most = max(float((kept[name].double() - made[name].double()).abs().max()) for name in made)
    is_equal = all(torch.equal(kept[name], made[name]) for name in made)
    alike = _cosine([(kept[name] - begun[name], made[name] - begun[name]) for name in made])
    return record | {"equal": is_equal, "most": most if math.isfinite(most) else None, "alike": alike}


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the weights, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def _cosine(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """Return the cosine of two lists of tensors, each taken as one vector; None if one of them is zero."""
    sums = [
        (float((a.double() * b).sum()), float(a.double().square().sum()), float(b.double().square().sum()))
        for a, b in pairs
    ]
    inner, first, second = (math.fsum(parts) for parts in zip(*sums, strict=True))
    found = inner / math.sqrt(first * second) if first * second > 0 else math.nan
    return found if math.isfinite(found) else None


def _run_at(opened: RunCheckpoint, step: int, data: Path, recipe: Path | None) -> TrainingRun:
    """Return the run as it was after a step; step 0 is the start, with the weights that the seed gives.

    The run reports nothing, and its out folder no longer exists.
    """
    first = open_run_checkpoint(_of_step(opened.weights, step), recipe) if step else opened
    believed = _recipe_of(first)
    with tempfile.TemporaryDirectory(prefix="gpurun-replay-") as own:
        out = Path(own)
        if step:
            _lay_out(opened.weights, step, out)
        run = open_run(
            believed, data, out, processes=Processes(), reporter=Reporter(out, is_first=False),
            device=choose_device(believed.train.precision, 0, 1),
        )  # fmt: skip
    if run.state.step != step:
        raise Refused(f"this data begins at step {run.state.step}, not at step {step}")
    return run


def _recipe_of(opened: RunCheckpoint) -> Recipe:
    """Return the checkpoint's recipe, with the micro-batch that fitted there, which decides the order of sums."""
    try:
        recipe = parse_recipe(completed(opened.state["recipe"]))
    except (RecipeError, TypeError, AttributeError) as error:
        raise Refused(f"its recipe is invalid: {error}") from error
    room = opened.state.get("room")
    fits = room.get("fits") if isinstance(room, dict) else None
    if type(fits) is int and 1 <= fits < recipe.train.micro_batch:
        recipe = replace(recipe, train=replace(recipe.train, micro_batch=fits))
    return recipe


def _of_step(weights: Path, step: int) -> Path:
    return weights.with_name(f"{step:06d}.{_SUFFIXES['weights']}")


def _lay_out(weights: Path, step: int, out: Path) -> None:
    """Make an out folder with one checkpoint, by links."""
    (out / "checkpoints").mkdir()
    files = []
    for kind, suffix in _SUFFIXES.items():
        name, source = f"checkpoints/{step:06d}.{suffix}", weights.with_name(f"{step:06d}.{suffix}").absolute()
        if not source.is_file():
            raise Refused(f"{source.name} is missing")
        (out / name).symlink_to(source)
        entry = {"name": name, "bytes": source.stat().st_size, "sha256": sha256_of_file(source)}
        files.append(entry | {"kind": kind, "step": step})
    (out / "MANIFEST.json").write_text(json.dumps({"v": 1, "latest": step, "best": None, "files": files}))


def _span(text: str) -> tuple[int, int]:
    first, _, until = text.partition(":")
    return int(first), int(until)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.replay", description="Compute a checkpoint's loss again.")
    parser.add_argument("checkpoint", type=Path, help="a run's out folder, or one NNNNNN.model.safetensors in it")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the shards that it was trained on")
    parser.add_argument("--recipe", type=Path, metavar="JSON", help="a recipe to use in place of the checkpoint's")
    parser.add_argument(
        "--again", type=_span, action="append", default=[], metavar="FROM:TO", help="also repeat these steps"
    )
    given = parser.parse_args(arguments)
    try:
        print(json.dumps(replay_steps(given.checkpoint, given.data, given.recipe, given.again)), flush=True)
    except TrainerError as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return Refused.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
