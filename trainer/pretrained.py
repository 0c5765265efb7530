"""Starts a model from weights: a published GPT-2, a model exported for transformers, or the checkpoint of a run.

Only safetensors files and JSON are read, never a pickle. Published GPT-2 files have the linear weights as (in, out),
and some have the causal masks. The trainer's own files have them as (out, in).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import TensorFileError, read_tensors
from trainer.errors import Refused
from trainer.model import GPT

__all__ = ["LINEAR_NAMES", "TOKENIZER_KEY", "find_weights", "load_weights"]

TOKENIZER_KEY = "gpurun_tokenizer_sha256"
"""The key of an exported config.json that identifies the vocabulary of its ids."""
LINEAR_NAMES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""The endings of the names of a GPT-2's linear weights."""
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_CHECKPOINT = re.compile(r"(\d{6})\.model\.safetensors")
AS_PUBLISHED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
"""Values that a config.json must have if it has these keys; others make another network of the same tensors."""


@dataclass(frozen=True)
class _Source:
    """The tensors of a file of weights, and what the JSON file beside it states."""

    path: Path
    tensors: dict[str, Tensor]
    heads: int | None
    """The number of attention heads, which no tensor's shape shows; None if no file beside the weights states it."""
    tokenizer_sha256: str | None
    """The digest of the vocabulary; known only for a run's checkpoint, and for an export of one."""


def find_weights(path: Path) -> Path:
    """Return the file of weights for a path: the file itself, a folder's model.safetensors or its newest checkpoint.

    If there is a manifest, only the checkpoints that it lists are used, because others may be left over from a process
    that died while saving.
    """
    if not path.is_dir():
        return path
    whole = path / "model.safetensors"
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = sorted(file for file in folder.iterdir() if _CHECKPOINT.fullmatch(file.name))
    if whole.is_file() or not found:
        return whole
    named = _named(folder.parent / "MANIFEST.json")
    return max((file for file in found if f"{folder.name}/{file.name}" in named), default=found[-1])


def _named(manifest: Path) -> set[str]:
    """Return the names in a manifest; an empty set if it is missing, as beside checkpoints that were copied."""
    try:
        return {entry["name"] for entry in json.loads(manifest.read_text(encoding="utf-8"))["files"]}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"{manifest} cannot be understood: {error!r}; name one file of weights") from error


def load_weights(model: GPT, path: Path, *, tokenizer_sha256: str | None = None) -> None:
    """Set every weight of the model from a file or folder; if that is impossible, raise Refused and change nothing.

    The file's vocabulary may be smaller than the model's: the added rows are as unlikely as the least likely token. Its
    context may be longer: the first positions are used. If it has no head and the model needs one, the embedding is
    used. `tokenizer_sha256` identifies the vocabulary of the data. A checkpoint with another vocabulary is refused, and
    so is an export of one.
    """
    source = _read(find_weights(path))
    expected = model.state_dict()
    tensors = _fitted(source, expected, model)
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    preset = model.config.preset
    if missing:
        raise Refused(f'{source.path} has no {missing[0]}, which a model of preset "{preset}" needs{_bias(missing)}')
    if unknown:
        raise Refused(f'{source.path} has {unknown[0]}, which this model of preset "{preset}" lacks{_bias(unknown)}')
    different = [
        f"{name} is {list(tensors[name].shape)} there and {list(expected[name].shape)} here"
        for name in expected
        if tensors[name].shape != expected[name].shape
    ]
    if different:
        raise Refused(f"{source.path} has another shape: " + "; ".join(different[:3]))
    if source.heads not in (None, model.config.heads):
        raise Refused(f"{source.path} was trained with {source.heads} heads; model.heads is {model.config.heads}")
    if tokenizer_sha256 is not None and source.tokenizer_sha256 not in (None, tokenizer_sha256):
        theirs = f"{source.tokenizer_sha256[:12]}, the data's is {tokenizer_sha256[:12]}"
        raise Refused(f"{source.path} was trained with another tokeniser: its sha256 is {theirs}")
    model.load_state_dict(tensors)


def _bias(names: list[str]) -> str:
    """Return a hint that model.bias should have the other value, if all the names are of biases, else ""."""
    return "; model.bias must have the other value" if all(name.endswith(".bias") for name in names) else ""


def _read(path: Path) -> _Source:
    """Read a file's tensors, of either kind, under the trainer's names and as (out, in)."""
    try:
        tensors = read_tensors(path)
    except TensorFileError as error:
        raise Refused(f"{path} is not a safetensors file ({error}); nothing else is read, never a pickle") from error
    except OSError as error:
        others = ", ".join(sorted(file.name for file in path.parent.glob("*model*")))
        there = f"; convert {others} to one safetensors file first" if others else ""
        raise Refused(f"the weights {path} cannot be read: {error.strerror}{there}") from error
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not _MASK.fullmatch(name)}
    first = tensors.get("h.0.attn.c_attn.weight")
    if first is not None and first.dim() == 2 and first.shape[0] < first.shape[1]:
        linear = {name for name in tensors if name.endswith(LINEAR_NAMES)}
        tensors = {name: tensor.t() if name in linear else tensor for name, tensor in tensors.items()}
    return _Source(path, tensors, *_heads_and_tokeniser(path))


def _heads_and_tokeniser(path: Path) -> tuple[int | None, str | None]:
    """Return the number of heads and the tokeniser's digest from the JSON file beside the weights; None if unknown.

    That file is a checkpoint's state, or a config.json. Refused if it describes another model than GPT-2.
    """
    checkpoint = _CHECKPOINT.fullmatch(path.name)
    beside = path.with_name(f"{checkpoint[1]}.state.json" if checkpoint else "config.json")
    try:
        record: Any = json.loads(beside.read_text(encoding="utf-8"))
        if checkpoint:
            return int(record["recipe"]["model"]["heads"]), str(record["data"]["tokenizer"])
        heads = int(record["n_head"])
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"{beside} does not say how many heads {path.name} has: {error!r}") from error
    for key, known in AS_PUBLISHED.items():
        if record.get(key, known[0]) not in known:
            stated = f"{key} {json.dumps(record[key])}"
            raise Refused(
                f"{beside} says {stated}, GPT-2 has {json.dumps(known[0])}: with it {path.name} is another model"
            )
    return heads, str(record[TOKENIZER_KEY]) if TOKENIZER_KEY in record else None


def _fitted(source: _Source, expected: Mapping[str, Tensor], model: GPT) -> dict[str, Tensor]:
    """Adapt a file's tensors to the model: copy or drop a tied head, pad the vocabulary, cut the positions.

    Biases of zeros are dropped if the model has none. Refused if a head would be lost.
    """
    tensors = dict(source.tensors)
    embedding, head = tensors.get("wte.weight"), tensors.get("lm_head.weight")
    if embedding is None:
        raise Refused(f"{source.path} holds no wte.weight: it is not a GPT's file")
    if not model.config.bias:  # An export has all biases, as zeros.
        tensors = {name: t for name, t in tensors.items() if not name.endswith(".bias") or t.any()}
    if model.lm_head is None and head is not None:
        if not torch.equal(head, embedding):
            raise Refused(f"{source.path} has a separate head; model.tied must be false")
        del tensors["lm_head.weight"]
    if model.lm_head is not None and head is None:
        tensors["lm_head.weight"] = embedding
    for name in ("wte.weight", "lm_head.weight"):
        if name in tensors and name in expected:
            tensors[name] = _padded(tensors[name], expected[name].shape[0], tensors.get("ln_f.bias"))
    positions = tensors.get("wpe.weight")
    if positions is not None and positions.dim() and "wpe.weight" in expected:
        tensors["wpe.weight"] = positions[: expected["wpe.weight"].shape[0]]
    return tensors


def _padded(table: Tensor, rows: int, bias: Tensor | None) -> Tensor:
    """Return a table (n, width) with at least `rows` rows. Added rows are as unlikely as possible; zeros would be
    likely.

    The head reads the last LayerNorm's `bias` (width) plus parts that vary. The row that is least likely by the bias is
    repeated.
    """
    if table.dim() != 2 or not 0 < table.shape[0] < rows:  # A tensor of another shape is refused later.
        return table
    if bias is None or bias.shape != table.shape[1:]:
        unlikely = table.float().mean(0).to(table.dtype)
    else:
        unlikely = table[(table.float() @ bias.float()).argmin()]
    return torch.cat((table, unlikely.expand(rows - table.shape[0], -1)))
