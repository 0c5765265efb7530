"""Goes on from the newest sound checkpoint, on any number of processes: its own, or one that came with the data.

The first process reads and decides; the others, which may be on other machines, are sent what it found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from trainer.errors import Refused
from trainer.optim import load_optimizer_tensors, optimizer_tensors
from trainer.recipe import Recipe, differing_keys
from trainer.room import asked_of_the_card, cut_as_before
from trainer.run import Run
from trainer.saving import CheckpointWriter, Snapshot
from trainer.shards import TokenData

__all__ = ["Restored", "restore_model", "restore_optimizer", "snapshot"]

_EARLIER = "continue"
"""The folder beside the shards that holds the checkpoint of an earlier run."""
_UNFIT = (KeyError, TypeError, AttributeError, ValueError, RuntimeError)
"""What a checkpoint that is not this model's can raise while it is taken apart."""


@dataclass
class Restored:
    """A checkpoint whose model is in place; the optimiser's tensors are only in the first process."""

    state: dict[str, Any]
    layout: dict[str, tuple[torch.dtype, torch.Size]]
    optimizer: dict[str, Tensor]


def snapshot(run: Run) -> Snapshot:
    """Return what a checkpoint of this moment holds. Where it is sharded, all processes must go through it."""
    step, tokens = run.progress.step, run.progress.step * run.recipe.train.batch_tokens
    state: dict[str, Any] = {"v": 1, "step": step, "tokens": tokens, "torch": torch.__version__}
    state |= {"loss": run.progress.loss, "val_loss": run.progress.val_loss}
    state |= {"skipped_steps": run.progress.skipped_steps}
    state |= {"room": {**asked_of_the_card(run), "fits": run.plan.micro_batch}}
    state |= {"loss_scale": run.scale.as_record(), "recent": run.spikes.as_record()}
    state |= {"recipe": run.recipe.as_record(), "data": run.data.identity()}
    model = run.parallel.whole(run.model.state_dict())
    return Snapshot(step, model, run.parallel.whole(optimizer_tensors(run.model, run.optimizer)), state)


def _refuse_another_run(state: Mapping[str, Any], recipe: Recipe, data: TokenData) -> None:
    """Refuse to go on from a checkpoint of another recipe or other data."""
    keys = differing_keys(state["recipe"], recipe.as_record())
    identity = data.identity()
    keys += [f"data.json: {key}" for key in identity if state["data"].get(key) != identity[key]]
    if keys:
        raise Refused(f"the checkpoint of step {state['step']} was trained with other values of {', '.join(keys)}")


def _unfit(step: int, error: Exception) -> Refused:
    return Refused(f"the checkpoint of step {step} does not fit the recipe's model: {error}")


def _earlier_step(data: Path) -> int | None:
    """Return the step of the earlier run's checkpoint beside the shards; None where none was brought along."""
    place = data / _EARLIER
    if not place.exists():
        return None
    step, _ = CheckpointStore(place).newest_sound()
    if step is None:
        raise Refused(f"{place} has no whole checkpoint to go on from")
    return step


def _latest(out: Path) -> int:
    """Return the step of the latest checkpoint that a manifest names; 0 where there is none to go on from."""
    try:
        return int(json.loads((out / "MANIFEST.json").read_text(encoding="utf-8"))["latest"] or 0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0  # CheckpointStore says what is wrong with it.


def restore_model(run: Run, data: Path, out: Path) -> Restored | None:
    """Put the model back to the newest sound checkpoint, if there is any; the optimiser is still to be made.

    That of `out` comes first; until there is one, that of an earlier run which lies in the folder `data`.
    """
    found: list[Checkpoint] = []
    latest = run.processes.to_first(_latest(out))

    def choose() -> tuple[list[int], dict[str, Any] | None, dict[str, tuple[torch.dtype, torch.Size]]]:
        farthest = max(range(run.processes.count), key=latest.__getitem__)
        if latest[farthest] > latest[0]:  # A rendezvous may call another machine the first one than it did before.
            found_there = f"the machine of process {farthest} has the checkpoint of step {latest[farthest]} in {out}"
            raise Refused(f"{found_there}, and the first machine, which saves, has none of that step; copy it there")
        store = CheckpointStore(out)
        step, damaged = store.newest_sound()
        run.writer = CheckpointWriter(store, run.reporter)
        place, step = (out, step) if step is not None else (data / _EARLIER, _earlier_step(data))
        if step is None:
            return damaged, None, {}
        found.append(read_checkpoint(place, step))
        try:
            _refuse_another_run(found[0].state, run.recipe, run.data)
            run.model.load_state_dict(found[0].model)
        except _UNFIT as error:
            raise _unfit(step, error) from error
        return damaged, found[0].state, {name: (t.dtype, t.shape) for name, t in found[0].optimizer.items()}

    damaged, state, layout = run.processes.from_first(choose)
    if damaged:
        step = state["step"] if state else 0
        message = f"the checkpoints of steps {damaged} are damaged; going on from step {step}"
        run.reporter.warning(step, "checkpoint.damaged", message)
    if state is None:
        return None
    run.processes.share(run.model.state_dict().values())
    return Restored(state, layout, found[0].optimizer if found else {})


def restore_optimizer(run: Run, restored: Restored) -> None:
    """Put the optimiser and the progress back; each tensor goes from the first process to where it belongs."""
    state, tensors = restored.state, {}
    for name, (dtype, shape) in restored.layout.items():
        known = restored.optimizer.pop(name, None)
        tensor = torch.empty(shape, dtype=dtype, device=run.device.torch) if known is None else known
        tensor = tensor.to(run.device.torch)
        run.processes.share([tensor])
        tensors.update(run.parallel.split({name: tensor}, run.model))

    def load() -> None:
        try:
            load_optimizer_tensors(run.model, run.optimizer, tensors)
            run.progress.step, run.progress.loss = state["step"], state["loss"]
            run.progress.val_loss = state.get("val_loss")  # One from before this was noted is judged again.
            run.progress.skipped_steps = state["skipped_steps"]
            run.scale.restore(state["loss_scale"])
            run.spikes.restore(state["recent"])
            cut_as_before(run, state.get("room", {}))
        except _UNFIT as error:
            raise _unfit(state["step"], error) from error

    run.processes.agree(load)
    run.saved_step = run.progress.step
