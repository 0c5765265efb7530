"""Measures a run's real speed from its first steps, and predicts how long the rest takes.

Times come from the trainer's events, which the machine reports; tokens come from the plan.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpurun.core.trainer_events import (
    CheckpointEvent,
    EvaluationEvent,
    SampleEvent,
    StartEvent,
    StepEvent,
    TrainerEvent,
)
from gpurun.jobs.training.estimate import FORWARD_SHARE, Pieces

MEASURED_STEPS = 50
"""The measurement replaces the estimate after this many steps, not counting the first step, which compiles."""
LEAST_CLEAN_STEPS = 10
"""The fewest steps from which a speed is computed, because some work is done only every few steps."""
_MOST_PACES = 64


@dataclass(frozen=True)
class MeasuredSpeed:
    """The speed after the first steps, and the seconds that the rest of the training takes at that speed."""

    step: int
    steps: int
    step_s: float
    tokens_per_s: float
    elapsed_s: float
    left_s: float
    memory_peak_bytes: int | None


@dataclass(frozen=True)
class Seen:
    """The figures of a trainer's latest process. `start_s` is the time from its start to the end of its first step."""

    step: int
    steps: int
    step_s: float
    tokens_per_s: float
    start_s: float
    memory_peak_bytes: int | None
    val_losses: tuple[tuple[int, float], ...]


class Meter:
    """Computes a trainer's speed from its events, which it takes one by one."""

    def __init__(self, resolved: Mapping[str, Any], steps: int = 0) -> None:
        """Measure a run of a resolved recipe; if `steps` is above 0, a command, of which nothing else is known."""
        self._pieces = Pieces(steps, 1, steps + 1, 1, steps + 1) if steps else Pieces.from_recipe(resolved)
        self._reset_counts()

    def _reset_counts(self) -> None:
        """Reset all counts, because a new process of the trainer has started."""
        self._first: int | None = None
        self._last: tuple[int, float] = (0, 0.0)
        self._clean_s, self._clean_steps = 0.0, 0
        self._block_s, self._block_steps = 0.0, 0
        self._paces: deque[float] = deque(maxlen=_MOST_PACES)
        self._mixed_s, self._mixed_steps = 0.0, 0
        self._evals_s = 0.0
        self._evals = 0
        self._saves = 0
        self._is_clean = True
        self._start_s = 0.0
        self._memory: int | None = None
        self._losses: list[tuple[int, float]] = []

    def take(self, event: TrainerEvent) -> MeasuredSpeed | None:
        """Process an event. Return the measured speed, or None until fifty steps after the first step are measured."""
        match event:
            case StartEvent():
                self._reset_counts()
            case EvaluationEvent():
                self._evals_s += event.eval_s or 0.0
                self._evals, self._is_clean = self._evals + 1, False
                later = self._losses[-1][0] if self._losses else 0
                if event.val_loss is not None and event.step is not None and event.step > later:
                    self._losses.append((event.step, event.val_loss))
            case SampleEvent() | CheckpointEvent():
                self._saves += isinstance(event, CheckpointEvent)
                self._is_clean = False
            case StepEvent():
                return self._take_step(event)
        return None

    def _take_step(self, event: StepEvent) -> MeasuredSpeed | None:
        step = event.step
        elapsed_s = event.elapsed_s
        pieces = self._pieces
        if pieces is None or elapsed_s is None or step is None or not self._last[0] < step <= pieces.steps:
            return None
        if self._first is None:
            self._first, self._start_s = step, elapsed_s
        else:
            self._add_step_time(step - self._last[0], elapsed_s - self._last[1])
        self._last, self._is_clean = (step, elapsed_s), True
        memory = event.memory_peak_bytes
        self._memory = memory if memory is not None and 0 < memory < 1 << 50 else None
        if step - self._first < MEASURED_STEPS or step == pieces.steps:
            return None
        return self._compute_speed(pieces)

    def _add_step_time(self, steps: int, took_s: float) -> None:
        """Add the time between two step events, separately if it includes an evaluation, a sample or a checkpoint."""
        if self._is_clean:
            self._clean_s, self._clean_steps = self._clean_s + took_s, self._clean_steps + steps
            self._block_s, self._block_steps = self._block_s + took_s, self._block_steps + steps
            if self._block_steps >= LEAST_CLEAN_STEPS:
                self._paces.append(self._block_s / self._block_steps)
                self._block_s, self._block_steps = 0.0, 0
        else:
            self._mixed_s, self._mixed_steps = self._mixed_s + took_s, self._mixed_steps + steps

    def seen(self) -> Seen | None:
        """Return the figures from all events so far; None if there are too few."""
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
        """Return the mean seconds per step, without evaluations; None before the second step."""
        if self._clean_steps >= LEAST_CLEAN_STEPS:
            step_s = self._clean_s / self._clean_steps
        elif self._clean_steps + self._mixed_steps:
            step_s = (self._clean_s + self._mixed_s - self._evals_s) / (self._clean_steps + self._mixed_steps)
        else:
            return None
        return step_s if 0 < step_s < math.inf else None

    def _usual_step_s(self) -> float | None:
        """Return the median seconds per step, which ignores warm-up and single disturbances."""
        usual_s = statistics.median(self._paces) if self._paces else 0.0
        return usual_s if usual_s > 0 else self._step_s()

    def _compute_speed(self, pieces: Pieces) -> MeasuredSpeed | None:
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
        return MeasuredSpeed(
            step=step,
            steps=pieces.steps,
            step_s=step_s,
            tokens_per_s=pieces.batch_tokens / step_s,
            elapsed_s=elapsed_s,
            left_s=left_s,
            memory_peak_bytes=self._memory,
        )
