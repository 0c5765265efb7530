"""The load of the machine's GPUs now, in a small file of the run folder: for viewers, not durable, and no evidence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpurun.core.paths import RunFolder
from gpurun.core.untrusted import read_object, whole

# A file that is older than this is from a machine that no longer answers.
STALE_S = 30.0


@dataclass(frozen=True)
class GpuReading:
    """The load of all `count` GPUs of a machine at `wall` (this computer's clock); a value that no GPU reports is None.

    `use_percent` is the mean, `watts` the sum. `memory_mib` is the memory in use and `memory_of_mib` the memory that
    exists. These two and `celsius` are each the highest value of any one GPU.
    """

    wall: float
    count: int
    use_percent: int | None
    memory_mib: int | None
    memory_of_mib: int | None
    celsius: int | None
    watts: int | None


def write_gpus(folder: RunFolder, wall: float, cards: Sequence[Mapping[str, Any]]) -> None:
    """Write the agent's latest report of the GPUs (`cards`), which arrived at `wall`; ignore errors of the disk."""
    half = folder.gpus.with_suffix(".tmp")
    with suppress(OSError):  # These figures are only for display: a full disk must not end the watch.
        half.write_text(json.dumps({"wall": wall, "cards": list(cards)}))
        os.replace(half, folder.gpus)


def read_gpus(folder: RunFolder, now_wall: float) -> GpuReading | None:
    """Return the load of the run's GPUs; None if there is no valid report from the last STALE_S seconds."""
    try:
        content = read_object(folder.gpus)
        wall, cards = float(content["wall"]), list(content["cards"])
        if not cards or abs(now_wall - wall) >= STALE_S:
            return None
        figures = {key: [figure for card in cards if (figure := whole(card[key])) is not None] for key in _MERGE}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return GpuReading(
        wall, len(cards), **{key: merge(figures[key]) if figures[key] else None for key, merge in _MERGE.items()}
    )


def _compute_mean(figures: list[int]) -> int:
    return round(sum(figures) / len(figures))


_MERGE: Mapping[str, Callable[[list[int]], int]] = {
    "use_percent": _compute_mean,
    "memory_mib": max,
    "memory_of_mib": max,
    "celsius": max,
    "watts": sum,
}
