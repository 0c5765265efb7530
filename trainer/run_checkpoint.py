"""A checkpoint of a run, opened to be used where a machine that nobody trusts may have written it.

Nothing is unpickled. What its files say is bounded before it is believed: a model is built only once the file of
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
"""Of a checkpoint's state, which has a few thousand."""


@dataclass(frozen=True)
class RunCheckpoint:
    """The file of weights, and what stands in the state beside it: a step, and objects called recipe and data."""

    weights: Path
    state: dict[str, Any]

    def tensors(self, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
        """Return the weights by name, if they are all those of the module that `build` makes, and finite; or Refused.

        The module is made without memory: what a state describes may be larger than any machine.
        """
        with torch.device("meta"):
            wanted = {name: list(tensor.shape) for name, tensor in build().state_dict().items()}
        try:
            tensors = read_tensors(self.weights)
        except (OSError, TensorFileError) as error:
            raise _unsound(self.weights, error) from error
        there = {name: list(tensor.shape) for name, tensor in tensors.items()}
        for name in sorted(wanted.keys() | there.keys()):
            if wanted.get(name) != there.get(name):
                said = f"{name} is {there.get(name, 'missing')}, and its recipe wants {wanted.get(name, 'none')}"
                raise _unsound(self.weights, said)
            if not tensors[name].isfinite().all():
                raise _unsound(self.weights, f"not all of {name} are numbers")
        return tensors


def open_run_checkpoint(path: Path, recipe: Path | None = None) -> RunCheckpoint:
    """Open a file of weights, or the newest of a folder, with the state beside it; Refused where either is not sound.

    `recipe` is a JSON file with the run's recipe, for who has it elsewhere: then the state's is not read.
    """
    weights = find_weights(path)
    if not weights.name.endswith(_SUFFIX):
        what = f"there is no checkpoint in {path}" if path.is_dir() else f"{weights} is no checkpoint of a run"
        raise Refused(f"{what}: those are named NNNNNN{_SUFFIX}")
    try:
        _check_digest(weights.absolute())
        state = _read_object(weights.with_name(weights.name.removesuffix(_SUFFIX) + ".state.json"))
        if recipe is not None:
            state["recipe"] = _read_object(recipe)
        if type(state["step"]) is not int or not 0 <= state["step"] < 1 << 53:
            raise ValueError("its step is no whole number")
        if not isinstance(state["recipe"], dict) or not isinstance(state["data"], dict):
            raise ValueError("its recipe or its data is no object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unsound(weights, error) from error
    return RunCheckpoint(weights, state)


def _unsound(weights: Path, why: object) -> Refused:
    said = f"it has no {why}" if isinstance(why, KeyError) else why
    return Refused(f"{weights.name} is not a sound checkpoint: {said}")


def _read_object(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{path.name} is longer than {_MOST_BYTES} bytes")
    record = json.loads(content, parse_constant=_no_number)
    if not isinstance(record, dict):
        raise ValueError(f"{path.name} is no object")
    return record


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _check_digest(weights: Path) -> None:
    """Refuse weights that are not those which the run's manifest has, where it is there to ask."""
    manifest = weights.parents[1] / "MANIFEST.json"
    if not manifest.is_file():
        return
    name = f"{weights.parent.name}/{weights.name}"
    wanted = next((entry["sha256"] for entry in _read_object(manifest)["files"] if entry["name"] == name), None)
    if wanted != sha256_of_file(weights):
        raise Refused(f"{weights} is not the file that {manifest} names; bring it back from the run's artifacts")
