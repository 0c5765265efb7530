"""Reads and writes the weights of nanoGPT and minGPT: `python -m trainer.foreign_weights ckpt.pt DIR`.

Their files are pickles, and torch.load is not used: this reader makes only tensors and plain containers, and runs no
code. The command writes model.safetensors and config.json into DIR, from which a run can start. Exit codes: 0 written,
2 refused.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import pickle
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import write_tensors
from trainer.errors import Refused
from trainer.pretrained import LINEAR_NAMES
from trainer.recipe import ModelConfig

__all__ = ["mingpt_files", "nanogpt_files", "read_foreign"]

_PREFIXES = re.compile(r"^(?:_orig_mod\.|module\.|transformer\.)+")
"""Matches the prefixes that torch.compile, DDP, nanoGPT and minGPT put before a tensor's name."""
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_DTYPES = {"Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Double": torch.float64}
_DTYPES |= {"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8}
_DTYPES["Bool"] = torch.bool
_MOST_PICKLE_BYTES = 64 << 20
"""The limit for a file's pickle, which describes its tensors, including an optimiser's."""
_MADE_BY = "it is not a checkpoint of nanoGPT (ckpt.pt) or minGPT (model.pt)"


def read_foreign(path: Path) -> tuple[dict[str, Tensor], int]:
    """Return a checkpoint's weights under this trainer's names, as (out, in), and its number of heads.

    Refused for other files, and if the number of heads is not known.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            record, shape = _pickled(archive, path), None
            if isinstance(record, dict) and isinstance(record.get("model"), dict):
                record, shape = record["model"], record.get("model_args")
            if not isinstance(record, dict) or not all(isinstance(value, _Stored) for value in record.values()):
                raise Refused(f"{path}: {_MADE_BY}")
            stored = {_PREFIXES.sub("", str(name)): value for name, value in record.items()}
            stored = {name: value for name, value in stored.items() if not _MASK.fullmatch(name)}
            if "wte.weight" not in stored or "h.0.attn.c_attn.weight" not in stored:
                raise Refused(f"{path}: {_MADE_BY}; it lacks wte.weight or h.0.attn.c_attn.weight")
            tensors = {name: value.read(archive, name, path) for name, value in stored.items()}
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError) as error:
        raise Refused(f"{path} is not a complete checkpoint of torch 1.6 or newer ({error})") from error
    heads = (shape if isinstance(shape, dict) else _beside(path)).get("n_head")
    if type(heads) is not int or heads < 1:
        where = 'minGPT writes it to a config.json in the same folder, {"model": {"n_head": 6}}'
        raise Refused(f"{path} does not say its number of heads: {where}")
    return tensors, heads


@dataclass(frozen=True)
class _Storage:
    """The stored numbers of a tensor: their type, the name of their file in the archive, and how many there are."""

    dtype: torch.dtype
    key: str
    numbers: int


@dataclass(frozen=True)
class _Stored:
    """A tensor that is described in a file but has not been read yet."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self, archive: zipfile.ZipFile, name: str, path: Path) -> Tensor:
        """Return the tensor in fp32; Refused if it claims more numbers than are stored, or has a negative stride."""
        numbers = math.prod(self.size)
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        if not (0 < numbers <= self.storage.numbers and self.offset >= 0 and last < self.storage.numbers):
            raise Refused(f"{path}: {name} claims more numbers than are stored")
        if min(self.stride, default=0) < 0:
            raise Refused(f"{path}: {name} has a negative stride")
        inside = _member(archive, f"data/{self.storage.key}", path)
        if inside.file_size != self.storage.numbers * self.storage.dtype.itemsize:
            raise Refused(f"{path}: {name} has {inside.file_size:,} bytes for {self.storage.numbers:,} numbers")
        plain = torch.frombuffer(bytearray(archive.read(inside)), dtype=self.storage.dtype)
        return plain.as_strided(self.size, self.stride, self.offset).float().contiguous().clone()


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> zipfile.ZipInfo:
    """Return the entry `name` of an archive from torch, whatever its top folder is called.

    Refused if it is missing, exists twice, or is compressed (torch never compresses).
    """
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        raise Refused(f"{path} is not a file of torch: it has no {name}, or it is compressed")
    return found[0]


def _pickled(archive: zipfile.ZipFile, path: Path) -> Any:
    """Return the content of the archive's pickle: tensors, plain values and containers of them; Refused otherwise."""
    pickled = _member(archive, "data.pkl", path)
    order = [info for info in archive.infolist() if info.filename.endswith("/byteorder")]
    if pickled.file_size > _MOST_PICKLE_BYTES or any(archive.read(info) != b"little" for info in order[:1]):
        raise Refused(f"{path} has a pickle of more than {_MOST_PICKLE_BYTES >> 20} MB, or another byte order")
    try:
        return _Plain(io.BytesIO(archive.read(pickled))).load()
    # A damaged or hostile pickle can raise almost anything.
    except Exception as error:  # noqa: BLE001
        why = str(error)[:200] or type(error).__name__
        raise Refused(f"{path} holds more than tensors and plain values, or is damaged: {why}") from None


class _Plain(pickle.Unpickler):
    """An unpickler that makes only plain values, containers, and tensors that are not read yet.

    If the pickle needs any other class or function, unpickling ends with an error.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return this module's replacement for a known class or function; UnpicklingError for any other."""
        if module == "torch" and name.endswith("Storage") and name.removesuffix("Storage") in _DTYPES:
            return _DTYPES[name.removesuffix("Storage")]
        made = {
            ("torch._utils", "_rebuild_tensor_v2"): _stored,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("collections", "OrderedDict"): OrderedDict,
        }.get((module, name))
        if made is None:
            raise pickle.UnpicklingError(f"it would run {module}.{name}")
        return made

    def persistent_load(self, pid: Any) -> _Storage:
        """Return a description of where numbers are stored in the archive."""
        kind, dtype, key, _, numbers = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(numbers) is not int:
            raise pickle.UnpicklingError("it refers to something other than stored numbers")
        return _Storage(dtype, str(key), numbers)


def _stored(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Stored:
    """Return a tensor from a pickle's arguments; UnpicklingError if they have other types."""
    plain = all(type(value) is int for value in (offset, *size, *stride)) and len(size) == len(stride)
    if not isinstance(storage, _Storage) or not plain:
        raise pickle.UnpicklingError("it has an invalid tensor")
    return _Stored(storage, offset, tuple(size), tuple(stride))


def _beside(path: Path) -> dict[str, Any]:
    """Return the shape in the config.json that minGPT writes beside a model; {} if there is none."""
    try:
        shape = json.loads(path.with_name("config.json").read_text(encoding="utf-8"))["model"]
        return shape if isinstance(shape, dict) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def write_weights(path: Path, folder: Path) -> None:
    """Write the weights of a checkpoint into a folder that a run can start from."""
    tensors, heads = read_foreign(path)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        write_tensors(file.write, tensors)
    (folder / "config.json").write_text(json.dumps({"n_head": heads}), encoding="utf-8")


def nanogpt_files(
    model: ModelConfig, tensors: Mapping[str, Tensor], tokens: Sequence[bytes], state: Mapping[str, Any], folder: Path
) -> None:
    """Write ckpt.pt for nanoGPT's sample.py, without the optimiser's state; for a model of characters also meta.pkl."""
    if not model.tied:
        raise Refused("nanoGPT's head is its embedding, but this model has a separate head (model.tied = false)")
    weights = _named(tensors, len(tokens))
    shape = {"n_layer": model.layers, "n_head": model.heads, "n_embd": model.width, "block_size": model.context}
    record = {
        "model": weights | {"lm_head.weight": weights["transformer.wte.weight"]},
        "model_args": {**shape, "bias": model.bias, "vocab_size": len(tokens), "dropout": model.dropout},
        "iter_num": state["step"],
        "best_val_loss": state.get("val_loss"),
        "config": {},
    }
    torch.save(record, folder / "ckpt.pt")
    if state["recipe"]["data"]["tokenizer"] == "char":
        characters = [token.decode("utf-8") for token in tokens]
        itos = dict(enumerate(characters))
        meta = {"vocab_size": len(itos), "itos": itos, "stoi": {sign: i for i, sign in itos.items()}}
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def mingpt_files(model: ModelConfig, tensors: Mapping[str, Tensor], tokens: Sequence[bytes], folder: Path) -> None:
    """Write model.pt and config.json for minGPT, with all biases, minGPT's masks and a separate head."""
    weights = _named(tensors, len(tokens))
    for name in list(weights):
        if name.endswith((*LINEAR_NAMES, "ln_1.weight", "ln_2.weight", "ln_f.weight")):
            weights.setdefault(name.removesuffix("weight") + "bias", torch.zeros(weights[name].shape[0]))
    weights.setdefault("lm_head.weight", weights["transformer.wte.weight"].clone())
    mask = torch.tril(torch.ones(model.context, model.context)).view(1, 1, model.context, model.context)
    weights |= {f"transformer.h.{layer}.attn.bias": mask.clone() for layer in range(model.layers)}
    torch.save(weights, folder / "model.pt")
    shape = {"model_type": None, "n_layer": model.layers, "n_head": model.heads, "n_embd": model.width}
    shape |= {"vocab_size": len(tokens), "block_size": model.context}
    (folder / "config.json").write_text(json.dumps({"model": shape}, indent=1) + "\n", encoding="utf-8")


def _named(tensors: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Return the weights under the names that nanoGPT and minGPT share, without the vocabulary's padding rows."""
    cut = {
        name: tensor[:rows] if name in ("wte.weight", "lm_head.weight") else tensor for name, tensor in tensors.items()
    }
    return {name if name == "lm_head.weight" else f"transformer.{name}": tensor.clone() for name, tensor in cut.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.foreign_weights", description="Read a ckpt.pt.")
    parser.add_argument("checkpoint", type=Path, help="nanoGPT's ckpt.pt or minGPT's model.pt")
    parser.add_argument("folder", type=Path, help="the folder for model.safetensors and config.json")
    given = parser.parse_args(argv)
    try:
        write_weights(given.checkpoint, given.folder)
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return refusal.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
