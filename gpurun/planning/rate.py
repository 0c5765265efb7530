"""What the first steps of a run show: its real speed, and with it how long the rest takes.

The trainer's events are the machine's word: what is no sane number is passed over, and tokens are the plan's own.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MEASURED_STEPS", "Measured", "Meter", "Pieces", "Seen"]

MEASURED_STEPS = 50
"""So many steps after the first, which compiles and warms up, replace the estimate."""
LEAST_CLEAN_STEPS = 10
"""Fewer say nothing, and so many are one pace: what comes every few steps belongs to a step as it usually is."""
HELLASWAG_ITEM_TOKENS = 4 * 128
"""Four endings, each after the context in a row padded to the longest of a few items: a guess by hand."""
LAUNCH_S = (0.0002, 0.0015)
"""Launching one layer's kernels, forward and backward, eager."""
FORWARD_SHARE = 1 / 3
"""Of a training pass."""
_MOST_PACES = 64


@dataclass(frozen=True)
class Pieces:
    """What a run consists of beside its steps: how often it evaluates and saves, and on how many tokens."""

    steps: int
    batch_tokens: int
    eval_every: int
    eval_tokens: int
    checkpoint_every: int
    sampled_tokens: int = 0
    """What goes through the model for a checkpoint's samples: a whole context for each token of each prompt."""
    sampled_layers: int = 0
    """The layers launched for it, beside their work: all prompts go on at once, but one token after the other."""

    @classmethod
    def of(cls, resolved: Mapping[str, Any]) -> Pieces | None:
        """Of the tables of a recipe.json; None where they do not say."""
        train, evaluation = resolved.get("train", {}), resolved.get("eval", {})
        told = (train, "steps"), (train, "batch_tokens"), (evaluation, "every"), (evaluation, "tokens")
        found = [table.get(key) for table, key in (*told, (train, "checkpoint_every"))]
        if not all(type(one) is int and one > 0 for one in found):
            return None
        sample, model = resolved.get("sample", {}), resolved.get("model", {})
        prompts, tokens = len(sample.get("prompts", ())), sample.get("tokens", 0)
        steps, batch_tokens, eval_every, eval_tokens, checkpoint_every = found
        items = evaluation.get("hellaswag_items", 0)
        eval_tokens += HELLASWAG_ITEM_TOKENS * items if type(items) is int and items > 0 else 0
        sampled_tokens = prompts * tokens * model.get("context", 0)
        sampled_layers = tokens * model.get("layers", 0) if prompts else 0
        return cls(steps, batch_tokens, eval_every, eval_tokens, checkpoint_every, sampled_tokens, sampled_layers)

    @property
    def sampled_steps(self) -> float:
        """A checkpoint's samples in steps: so few rows at once go through at half the pace of a step."""
        return self.sampled_tokens / 2.0 / self.batch_tokens

    def saves_from(self, step: int) -> int:
        """How many checkpoints are due at this step and later: one every so often, and one at the end."""
        return self._multiples(self.checkpoint_every, step) + 1

    def evaluations_from(self, step: int) -> int:
        """How many evaluations are due at this step and later: every checkpoint has one, too."""
        every, saved = self.eval_every, self.checkpoint_every
        both = self._multiples(math.lcm(every, saved), step)
        return self._multiples(every, step) + self._multiples(saved, step) - both + 1

    def beside_from(self, step: int) -> float:
        """All evaluations and samples from this step on, in steps."""
        evaluated = self.evaluations_from(step) * self.eval_tokens * FORWARD_SHARE / self.batch_tokens
        return evaluated + self.saves_from(step) * self.sampled_steps

    def launching_s(self, step: int) -> tuple[float, float]:
        """Seconds to launch all samples from this step on, (least, most); they are never compiled."""
        layers = self.saves_from(step) * self.sampled_layers
        return layers * LAUNCH_S[0] * FORWARD_SHARE, layers * LAUNCH_S[1] * FORWARD_SHARE

    def _multiples(self, every: int, step: int) -> int:
        """How many steps from this one on, but for the last, are a multiple."""
        return max(0, (self.steps - 1) // every - (max(1, step) - 1) // every)


@dataclass(frozen=True)
class Measured:
    """The speed after the first steps, and the seconds of training that are left at that speed."""

    step: int
    steps: int
    step_s: float
    tokens_per_s: float
    elapsed_s: float
    left_s: float
    memory_peak_bytes: int | None


@dataclass(frozen=True)
class Seen:
    """What all lines of a trainer's last process show; `start_s` is until the end of its first step."""

    step: int
    steps: int
    step_s: float
    tokens_per_s: float
    start_s: float
    memory_peak_bytes: int | None
    val_losses: tuple[tuple[int, float], ...]


class Meter:
    """Hears a trainer's events, one after the other, and says once what they show."""

    def __init__(self, resolved: Mapping[str, Any]) -> None:
        self._pieces = Pieces.of(resolved)
        self._begin()

    def _begin(self) -> None:
        """A process of the trainer has begun."""
        self._first: int | None = None
        self._last: tuple[int, float] = (0, 0.0)
        self._clean_s, self._clean_steps = 0.0, 0
        self._block_s, self._block_steps = 0.0, 0
        self._paces: deque[float] = deque(maxlen=_MOST_PACES)
        self._mixed_s, self._mixed_steps = 0.0, 0
        self._evals_s, self._evals, self._saves = 0.0, 0, 0
        self._is_clean = True
        self._start_s = 0.0
        self._memory: int | None = None
        self._losses: list[tuple[int, float]] = []

    def take(self, event: Mapping[str, Any]) -> Measured | None:
        """Hear an event; what has been measured, from the line of a step on that is the fiftieth after the first."""
        kind = event.get("kind")
        if kind == "start":
            self._begin()
        elif kind == "eval":
            self._evals_s += _seconds(event, "eval_s") or 0.0
            self._evals, self._is_clean = self._evals + 1, False
            step, loss = event.get("step"), event.get("val_loss")
            later = self._losses[-1][0] if self._losses else 0
            if type(step) is int and later < step < 2**53 and isinstance(loss, float) and math.isfinite(loss):
                self._losses.append((step, loss))
        elif kind in ("sample", "checkpoint"):
            self._saves += kind == "checkpoint"
            self._is_clean = False
        elif kind == "step":
            return self._step(event)
        return None

    def _step(self, event: Mapping[str, Any]) -> Measured | None:
        step, elapsed_s = event.get("step"), _seconds(event, "elapsed_s")
        pieces = self._pieces
        if pieces is None or elapsed_s is None or type(step) is not int or not self._last[0] < step <= pieces.steps:
            return None
        if self._first is None:
            self._first, self._start_s = step, elapsed_s
        else:
            self._count(step - self._last[0], elapsed_s - self._last[1])
        self._last, self._is_clean = (step, elapsed_s), True
        memory = event.get("memory_peak_bytes")
        self._memory = memory if type(memory) is int and 0 < memory < 1 << 50 else None
        if step - self._first < MEASURED_STEPS or step == pieces.steps:
            return None
        return self._measured(pieces)

    def _count(self, steps: int, took_s: float) -> None:
        """Add the time between two lines, apart where an evaluation or a checkpoint fell into it."""
        if self._is_clean:
            self._clean_s, self._clean_steps = self._clean_s + took_s, self._clean_steps + steps
            self._block_s, self._block_steps = self._block_s + took_s, self._block_steps + steps
            if self._block_steps >= LEAST_CLEAN_STEPS:
                self._paces.append(self._block_s / self._block_steps)
                self._block_s, self._block_steps = 0.0, 0
        else:
            self._mixed_s, self._mixed_steps = self._mixed_s + took_s, self._mixed_steps + steps

    def seen(self) -> Seen | None:
        """What has been heard so far, all in all; None where too little has."""
        step_s = self._step_s()
        if self._pieces is None or step_s is None or self._clean_steps + self._mixed_steps < LEAST_CLEAN_STEPS:
            return None
        return Seen(
            step=self._last[0],
            steps=self._pieces.steps,
            step_s=step_s,
            tokens_per_s=self._pieces.batch_tokens / step_s,
            start_s=self._start_s,
            memory_peak_bytes=self._memory,
            val_losses=tuple(self._losses),
        )

    def _step_s(self) -> float | None:
        """The mean of a step by itself; None before there was one."""
        if self._clean_steps >= LEAST_CLEAN_STEPS:
            step_s = self._clean_s / self._clean_steps
        elif self._clean_steps + self._mixed_steps:
            step_s = (self._clean_s + self._mixed_s - self._evals_s) / (self._clean_steps + self._mixed_steps)
        else:
            return None
        return step_s if 0 < step_s < math.inf else None

    def _usual_step_s(self) -> float | None:
        """A step as it usually is: the first ones warm up, and what disturbs one of five paces is none to go by."""
        usual_s = statistics.median(self._paces) if self._paces else 0.0
        return usual_s if usual_s > 0 else self._step_s()

    def _measured(self, pieces: Pieces) -> Measured | None:
        (step, elapsed_s), step_s = self._last, self._usual_step_s()
        if step_s is None:
            return None
        eval_s = pieces.eval_tokens * FORWARD_SHARE / pieces.batch_tokens * step_s
        sampled_s = pieces.sampled_steps * step_s
        if self._evals:
            eval_s = self._evals_s / self._evals
            sampled_s = pieces.sampled_tokens * eval_s / pieces.eval_tokens
        beside_s = max(0.0, self._mixed_s - self._mixed_steps * step_s - self._evals_s)
        saves = pieces.saves_from(step)
        saves_s = saves * sampled_s + sum(pieces.launching_s(step)) / 2
        if self._saves:
            saves_s = saves * beside_s / self._saves
        left_s = (pieces.steps - step) * step_s + pieces.evaluations_from(step) * eval_s + saves_s
        return Measured(
            step=step,
            steps=pieces.steps,
            step_s=step_s,
            tokens_per_s=pieces.batch_tokens / step_s,
            elapsed_s=elapsed_s,
            left_s=left_s,
            memory_peak_bytes=self._memory,
        )


def _seconds(event: Mapping[str, Any], key: str) -> float | None:
    """Seconds that somebody told, if they are sane."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        return None
    return float(value)
