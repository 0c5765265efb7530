"""What the machine's cards do now: a small file in the run folder for who watches; never durable, never evidence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpurun.core.paths import RunFolder
from gpurun.core.untrusted import read_object, whole

# What was not written again for so long tells of a machine that is not heard any more.
STALE_S = 30.0


@dataclass(frozen=True)
class GpuReading:
    """All cards of a machine at `wall`, by this machine's clock; None for what none of them tells.

    `use_percent` is the mean; `memory_mib` and `celsius` are of the card that has most, `watts` is the sum.
    """

    wall: float
    count: int
    use_percent: int | None
    memory_mib: int | None
    memory_of_mib: int | None
    celsius: int | None
    watts: int | None


def write_gpus(folder: RunFolder, wall: float, cards: Sequence[Mapping[str, Any]]) -> None:
    """Keep what the agent said last."""
    half = folder.gpus.with_suffix(".tmp")
    with suppress(OSError):  # A full disk ends no watch for the sake of a picture.
        half.write_text(json.dumps({"wall": wall, "cards": list(cards)}))
        os.replace(half, folder.gpus)


def read_gpus(folder: RunFolder, now_wall: float) -> GpuReading | None:
    """What the cards do, if that is known and not old."""
    try:
        told = read_object(folder.gpus)
        wall, cards = float(told["wall"]), list(told["cards"])
        if not cards or abs(now_wall - wall) >= STALE_S:
            return None
        figures = {key: [figure for card in cards if (figure := whole(card[key])) is not None] for key in _OF_ALL}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return GpuReading(
        wall, len(cards), **{key: of(figures[key]) if figures[key] else None for key, of in _OF_ALL.items()}
    )


def _mean(figures: list[int]) -> int:
    return round(sum(figures) / len(figures))


_OF_ALL: Mapping[str, Callable[[list[int]], int]] = {
    "use_percent": _mean,
    "memory_mib": max,
    "memory_of_mib": max,
    "celsius": max,
    "watts": sum,
}
