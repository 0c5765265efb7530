"""After the first steps the plan's estimate gives way to the measured rate, and cap and lease are held against it.

Nothing is lengthened and nothing more is spent: the lease stands as it was ordered. What changes is what is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil

from gpurun.core.money import Micros
from gpurun.core.progress import Event, RunState
from gpurun.ledger.untrusted import events_of
from gpurun.lifecycle.context import Context, Note
from gpurun.planning.budget import expected_end_s, rental_cost
from gpurun.planning.load import save_s
from gpurun.planning.rate import Measured, Meter

__all__ = ["Rating"]

MARGIN = 1.05
"""A cap that is advised holds a little more than was measured."""
_LONGEST_LINE_BYTES = 1 << 16


class Rating:
    """Hears what the trainer says while it is watched, and tells once how fast it really is."""

    def __init__(self, state: RunState, context: Context) -> None:
        self._context, self._meter = context, Meter(context.plan.resolved)
        self._is_told, self._rest = state.rated, b""
        self._found: Measured | None = None
        if not self._is_told:
            for event in events_of(context.folder.events):  # What came before a restart; the next line tells it anew.
                self._meter.take(event)

    def hear(self, new: bytes) -> None:
        """Take in what the trainer has said since the last look; of several lines the last one counts."""
        if self._is_told:
            return
        *lines, self._rest = (self._rest + new).split(b"\n")
        self._rest = self._rest[:_LONGEST_LINE_BYTES]
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                self._found = self._meter.take(event) or self._found

    def notes(self, state: RunState) -> Iterator[Note]:
        """The one record of it, as soon as there is something to tell."""
        if self._found is not None and not self._is_told:
            self._is_told = True
            yield Event.RATE_OBSERVED, verdict(self._found, state, self._context)


def verdict(measured: Measured, state: RunState, context: Context) -> dict[str, object]:
    """What the measured rate means for the lease and the cap: when training ends, at which step, for how much."""
    plan, lease = context.plan, context.plan.lease
    at_most_s = max(0.0, context.seconds_left(state) - lease.collect_s - save_s(plan.parameters))
    limit_s = min(at_most_s, max(0.0, lease.train_s - measured.elapsed_s))
    finishes = measured.left_s <= limit_s
    share = 1.0 if finishes else limit_s / measured.left_s
    expected_s = context.paid_s(state) + min(measured.left_s, limit_s) + expected_end_s(lease.collect_s)
    longer = lease.model_copy(update={"train_s": ceil(MARGIN * (measured.elapsed_s + measured.left_s))})
    needed = None if finishes else _cost(context, longer.total_s + longer.kill_allowance_s)
    return {
        "step": measured.step,
        "steps": measured.steps,
        "step_s": round(measured.step_s, 6),
        "tokens_per_s": round(measured.tokens_per_s, 3),
        "elapsed_s": round(measured.elapsed_s, 3),
        "left_s": round(measured.left_s, 3),
        "limit_s": round(min(limit_s, 1e9), 3),
        "finishes": finishes,
        "ends_at_step": measured.step + int((measured.steps - measured.step) * share),
        "expected_micros": _cost(context, expected_s),
        "cap_micros": plan.cap_micros,
        "needed_micros": needed,
        "memory_peak_bytes": measured.memory_peak_bytes,
    }


def _cost(context: Context, seconds: float) -> Micros:
    """What a rental of so many seconds costs, with all that is beside its rate."""
    plan, offer = context.plan, context.plan.offer
    if not offer.rate_micros_per_hour:
        return Micros(0)
    return rental_cost(offer, seconds, plan.parameters, int(plan.resolved["hardware"]["disk_gb"]))
