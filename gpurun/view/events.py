"""Reads trainer events that may lie: every field is checked for its type before anything is computed with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpurun.view.safe import safe_line

TrainerEvent = Mapping[str, Any]

_LONGEST_LINE_BYTES = 1 << 20
_LARGEST = 1e100  # No loss, rate or size comes near; sums and differences of larger ones may be infinite.
_LATEST_WALL = 32_503_680_000.0  # The year 3000: what calendars can format.


def parse_event(line: bytes) -> dict[str, Any] | None:
    """One line of events.jsonl, or None for whatever is not an object with a `kind`. Never raises."""
    if len(line) > _LONGEST_LINE_BYTES:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def number(event: TrainerEvent, key: str) -> float | None:
    """A figure that can be computed with, or None."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        figure = float(value)
    except OverflowError:
        return None
    return figure if abs(figure) < _LARGEST else None


def whole(event: TrainerEvent, key: str) -> int | None:
    """A whole number that is not negative, or None."""
    figure = number(event, key)
    return int(figure) if figure is not None and 0 <= figure < 2**63 else None


def words(event: TrainerEvent, key: str) -> str:
    """A string, harmless and in one line; anything else is empty."""
    value = event.get(key)
    return safe_line(value.replace("\n", " ")) if isinstance(value, str) else ""


def wall_of(event: TrainerEvent, otherwise: float) -> float:
    """When the event says it happened, if a calendar can show it."""
    wall = number(event, "wall")
    return wall if wall is not None and 0 <= wall < _LATEST_WALL else otherwise
