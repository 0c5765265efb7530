"""Notices a loss or a gradient norm that jumps: by its z-score among those of the last steps, as llm.c does."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

__all__ = ["SpikeGuard"]

WINDOW = 128
"""Steps that are remembered; before there are so many, nothing is a spike."""


class SpikeGuard:
    """Remembers the last losses and gradient norms. The spikes too: a new level is a spike only until it is usual."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in ("loss", "gradient norm")}

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Return what jumped, as the beginning of a sentence, or None; nothing is remembered yet."""
        for (name, seen), value in zip(self._seen.items(), (loss, grad_norm), strict=True):
            if len(seen) < WINDOW:
                continue
            mean = math.fsum(seen) / WINDOW
            spread = math.sqrt(math.fsum((one - mean) ** 2 for one in seen) / WINDOW)
            # Values that hardly differ have no spread to measure by.
            spread = max(spread, 1e-3 * abs(mean), 1e-12)
            score = (value - mean) / spread
            if score > self._threshold:
                return f"the {name} {value:.4g} is {score:.1f} standard deviations above the last {WINDOW} steps' mean"
        return None

    def remember(self, loss: float, grad_norm: float) -> None:
        """Take one step's values into the window; an overflow of fp16 has no norm."""
        for seen, value in zip(self._seen.values(), (loss, grad_norm), strict=True):
            if math.isfinite(value):
                seen.append(value)

    def as_record(self) -> dict[str, list[float]]:
        """Return the window for a checkpoint: a resumed run must judge alike."""
        return {name: list(seen) for name, seen in self._seen.items()}

    def restore(self, record: dict[str, Any]) -> None:
        """Take the window of a checkpoint."""
        for name, seen in self._seen.items():
            seen.clear()
            seen.extend(float(value) for value in record[name])
