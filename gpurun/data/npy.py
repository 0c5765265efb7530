"""Memory-maps a `.npy` file of tokens, after checking that numpy can safely parse its header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpurun.core.untrusted import plain_line

_MAGIC = b"\x93NUMPY"
_MOST_HEADER_BYTES = 10_000


def npy_row(path: Path) -> Any:
    """Return a file's array, memory-mapped; ValueError or OSError if it is not a valid .npy file.

    The header is checked first, because numpy reads as many bytes as its length field states (up to 4 GB), and
    evaluates them.
    """
    import numpy as np

    with path.open("rb") as file:
        head = file.read(12)
    length = int.from_bytes(head[8:10] if head[6:7] == b"\x01" else head[8:12], "little")
    if not head.startswith(_MAGIC) or length > _MOST_HEADER_BYTES:
        raise ValueError("its header is invalid" if head.startswith(_MAGIC) else "it does not begin like one")
    try:
        return np.load(path, mmap_mode="r")
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - Evaluating it can raise anything.
        raise ValueError(plain_line(f"{type(error).__name__} {error}", 120)) from None
