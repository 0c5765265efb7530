"""Opens a run's checkpoint that an untrusted machine may have written.

Nothing is unpickled. The sizes in its files are checked before they are used: a model is built only once the file of
weights was found to hold the tensors of that model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trainer.checkpoint import TensorFileError, read_tensors
from trainer.errors import Refused
from trainer.pretrained import find_weights
from trainer.shards import sha256_of_file

__all__ = ["RunCheckpoint", "open_run_checkpoint"]

_SUFFIX = ".model.safetensors"
_MOST_BYTES = 16 << 20
"""The limit for a checkpoint's state, which has a few thousand bytes."""


@dataclass(frozen=True)
class RunCheckpoint:
    """The file of weights, and the content of the state beside it: a step, and the objects recipe and data."""

    weights: Path
    state: dict[str, Any]

    def tensors(self, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
        """Return the weights by name; Refused unless they are finite and match the module that `build` makes.

        That module is built without memory for its weights, because a state may describe a model that is larger than
        any machine.
        """
        with torch.device("meta"):
            expected = {name: list(tensor.shape) for name, tensor in build().state_dict().items()}
        try:
            tensors = read_tensors(self.weights)
        except (OSError, TensorFileError) as error:
            raise _unsound(self.weights, error) from error
        there = {name: list(tensor.shape) for name, tensor in tensors.items()}
        for name in sorted(expected.keys() | there.keys()):
            if expected.get(name) != there.get(name):
                difference = (
                    f"{name} is {there.get(name, 'missing')}, but its recipe needs {expected.get(name, 'none')}"
                )
                raise _unsound(self.weights, difference)
            if not tensors[name].isfinite().all():
                raise _unsound(self.weights, f"{name} has values that are not finite numbers")
        return tensors


def open_run_checkpoint(path: Path, recipe: Path | None = None) -> RunCheckpoint:
    """Open a file of weights, or the newest of a folder, with the state beside it; Refused if either is invalid.

    `recipe` is a JSON file with the run's recipe; if it is given, the state's recipe is not read.
    """
    weights = find_weights(path)
    if not weights.name.endswith(_SUFFIX):
        what = f"there is no checkpoint in {path}" if path.is_dir() else f"{weights} is not a checkpoint of a run"
        raise Refused(f"{what}: checkpoints are named NNNNNN{_SUFFIX}")
    try:
        _check_digest(weights.absolute())
        state = _read_object(weights.with_name(weights.name.removesuffix(_SUFFIX) + ".state.json"))
        if recipe is not None:
            state["recipe"] = _read_object(recipe)
        if type(state["step"]) is not int or not 0 <= state["step"] < 1 << 53:
            raise ValueError("its step is not an integer")
        if not isinstance(state["recipe"], dict) or not isinstance(state["data"], dict):
            raise ValueError("its recipe or its data is not an object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unsound(weights, error) from error
    return RunCheckpoint(weights, state)


def _unsound(weights: Path, why: object) -> Refused:
    reason = f"it has no {why}" if isinstance(why, KeyError) else why
    return Refused(f"{weights.name} is not a valid checkpoint: {reason}")


def _read_object(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{path.name} is longer than {_MOST_BYTES} bytes")
    record = json.loads(content, parse_constant=_no_number)
    if not isinstance(record, dict):
        raise ValueError(f"{path.name} is not an object")
    return record


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _check_digest(weights: Path) -> None:
    """Refuse weights that differ from the run's manifest, if there is one."""
    manifest = weights.parents[1] / "MANIFEST.json"
    if not manifest.is_file():
        return
    name = f"{weights.parent.name}/{weights.name}"
    recorded = next((entry["sha256"] for entry in _read_object(manifest)["files"] if entry["name"] == name), None)
    if recorded != sha256_of_file(weights):
        raise Refused(f"{weights} is not the file that {manifest} lists; restore it from the run's artifacts")
