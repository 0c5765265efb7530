"""The safetensors file format: named tensors in a file that cannot run code when it is read.

8 bytes little-endian length, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors end to end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

__all__ = ["TensorFileError", "read_tensors", "write_tensors"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_LIMIT = 100_000_000


class TensorFileError(Exception):
    """The file is not a sound safetensors file."""


def write_tensors(write: Callable[[memoryview], Any], tensors: Mapping[str, Tensor]) -> None:
    """Hand the file's bytes to `write`, one tensor at a time: only one need be in the host's memory at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write(memoryview(len(text).to_bytes(8, "little") + text))
    for tensor in tensors.values():
        if tensor.numel():
            write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the entries in file order and where the tensors begin."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _HEADER_LIMIT):
        raise TensorFileError("the header is longer than the file")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"])), 8 + length
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TensorFileError("the header is not JSON of the expected form") from error


def _entry(name: str, entry: Any, expected_start: int) -> tuple[torch.dtype, list[int], int]:
    """Return (dtype, shape, bytes) of one entry that starts where the last one ended and holds what it says."""
    try:
        dtype, shape, (start, end) = _DTYPES[entry["dtype"]], list(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, end)):
            raise ValueError("sizes and offsets are whole numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise TensorFileError(f"tensor {name} is not described as it should be") from error
    bytes_wanted = math.prod(shape) * dtype.itemsize
    if start != expected_start or end - start != bytes_wanted:
        raise TensorFileError(f"tensor {name} does not lie where its shape says")
    return dtype, shape, bytes_wanted


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return every tensor of the file, on the CPU; raise TensorFileError where it is damaged."""
    tensors: dict[str, Tensor] = {}
    size = path.stat().st_size
    with path.open("rb") as file:
        header, start = _read_header(file, size)
        entries: Iterable[tuple[str, Any]] = header.items()
        offset = 0
        for name, described in entries:
            dtype, shape, length = _entry(name, described, offset)
            data = bytearray(length if start + offset + length <= size else 0)
            if file.readinto(data) != length:
                raise TensorFileError(f"the file ends before tensor {name} does")
            flat = torch.frombuffer(data, dtype=dtype) if length else torch.empty(0, dtype=dtype)
            tensors[name] = flat.reshape(shape)
            offset += length
        if start + offset != size:
            raise TensorFileError("the file is longer than its tensors")
    return tensors
