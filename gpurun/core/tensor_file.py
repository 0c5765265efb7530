"""Reads the header of an untrusted safetensors file: which tensors it has, and where they are. No tensor is read.

The file begins with 8 bytes: the length of the header (little-endian). Then come the header in JSON, {name: {dtype,
shape, data_offsets}}, and the tensors without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.core.paths import open_regular
from gpurun.core.untrusted import Malformed, parse_object, plain_line, whole

_MOST_HEADER_BYTES = 16 << 20
"""Enough for eighty thousand tensors with two hundred bytes each."""
_MOST_DIMENSIONS = 64
_WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in a file: its shape, the offset of its first byte, and the offset after its last byte."""

    shape: list[int]
    start: int
    stop: int


def read_tensor_places(path: Path) -> dict[str, TensorPlace]:
    """Return the place of each tensor by its name; Malformed if the file is incomplete or invalid."""
    with open_regular(path) as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise Malformed(f"its first 8 bytes announce a header of {length:,} bytes, but the file has {size:,}")
        if length > _MOST_HEADER_BYTES:
            raise Malformed(f"its header has {length:,} bytes, more than the limit of {_MOST_HEADER_BYTES:,}")
        try:
            header = parse_object(file.read(length))
        except Malformed as error:
            raise Malformed(f"its header cannot be read: {error}") from None
    header.pop("__metadata__", None)
    places = {name: _parse_place(name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)):
        if place.start != end:
            how = "overlaps the one before it" if place.start < end else "leaves a gap before it"
            raise Malformed(f"its tensor {plain_line(name, 80)} {how}")
        end = place.stop
    if end != size:
        raise Malformed(f"its tensors end at byte {end:,}, but the file has {size:,}")
    return places


def _parse_place(name: str, entry: Any, first: int) -> TensorPlace:
    fields = entry if isinstance(entry, Mapping) else {}
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    if (
        not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS or None in map(whole, shape)
        or not isinstance(offsets, list) or len(offsets) != 2 or None in map(whole, offsets)
    ):  # fmt: skip
        raise Malformed(f"its tensor {plain_line(name, 80)} has no shape or offsets")
    start, stop = offsets
    width = _WIDTHS.get(str(fields.get("dtype")))
    if stop < start or (width is not None and stop - start != math.prod(shape) * width):
        raise Malformed(f"its tensor {plain_line(name, 80)} has offsets that do not fit its shape")
    return TensorPlace(shape, first + start, first + stop)
