"""Divides the paid seconds into phases by this computer's clock, and the training phase by the machine's figures.

The phases of all rentals add up to the billable seconds, to the millisecond; time outside of all phases is "other". The
machine's figures only divide the training phase. If they add up to more than this phase, they are not used at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.journal_events import CreateIntended
from gpurun.core.journal_records import Event, Record, by_machine, opened_of
from gpurun.core.receipt_record import UNKNOWN, Planned, Timeline
from gpurun.core.receipt_rules import END_BY_MACHINE_CLOCK
from gpurun.core.trainer_events import CheckpointEvent, EvaluationEvent, StartEvent, StepEvent, TrainerEvent
from gpurun.core.untrusted import number, plain_data
from gpurun.ledger.billed_time import MEASURED, last_of
from gpurun.ledger.rental import Rental

# The phase that begins with a record of each event; the other events do not change the phase.
_BEGINS: dict[str, str] = {
    Event.CREATE_INTENDED: "boot",
    Event.READY_OBSERVED: "upload",
    Event.SHIP_OBSERVED: "training",
    Event.TRAIN_OBSERVED: "collect",
    Event.COLLECT_INTENDED: "collect",
    Event.COLLECT_OBSERVED: "destroy",
    Event.HOLD_INTENDED: "hold",
    Event.HOLD_OBSERVED: "destroy",
    Event.DESTROY_INTENDED: "destroy",
    Event.STEP_FAILED: "other",
}
_LEASE = {
    "boot": "boot_s",
    "setup": "setup_s",
    "upload": "ship_s",
    "training": "train_s",
    "collect": "collect_s",
    "destroy": "destroy_s",
}
# For an event that ends a phase: the phase, and the parts at its end that count as phases of their own, with the
# fields of the event that state how long these parts took.
_LAST_PARTS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    Event.READY_OBSERVED: ("boot", (("setup", "setup_s"), ("connect", "connect_s"))),
    Event.SHIP_OBSERVED: ("upload", (("unpack", "unpack_s"),)),
    Event.TRAIN_OBSERVED: ("training", (("collect", "drained_s"),)),
}


def phases_s(rentals: Sequence[Rental]) -> dict[str, float]:
    """Return the seconds of each phase that was reached, over all rentals. They add up to the billable seconds."""
    spent_ms: dict[str, int] = {}
    for rental in (rental for rental in rentals if rental.end != "refused"):
        for name, spent_us in _divide_into_phases(rental).items():
            spent_ms[name] = spent_ms.get(name, 0) + spent_us // 1000
    total_ms = sum(round(rental.seconds * 1000) for rental in rentals)
    spent_ms["other"] = 0
    spent_ms["other"] = total_ms - sum(spent_ms.values())
    return {name: ms / 1000 for name, ms in spent_ms.items()}


def _divide_into_phases(rental: Rental) -> dict[str, int]:
    """Return the microseconds of each phase of one rental, up to the end of its billable time."""
    records = [record for record in rental.records if record.seq <= rental.last_paid.seq]
    left_us, free_us = round(rental.seconds * 1e6), round(rental.queued_s * 1e6)
    spent: dict[str, int] = {}
    phase = "boot"
    for before, after in pairwise(records):
        phase = _BEGINS.get(str(before.event), phase)
        free_us -= (queued_us := min(free_us, after.us_since(before)))
        passed_us = min(left_us, after.us_since(before) - queued_us)
        left_us -= passed_us
        spent[phase] = spent.get(phase, 0) + passed_us
        if str(after.event) in _LAST_PARTS:
            whole, parts = _LAST_PARTS[str(after.event)]
            for part, key in parts:
                part_us = min(spent.get(whole, 0), _to_microseconds(number(getattr(after.typed, key))))
                if part_us:
                    spent[whole] -= part_us
                    spent[part] = spent.get(part, 0) + part_us
    return spent


class TrainingSplit:
    """The division of the trainer's seconds into parts, computed from its events. All figures are the machine's.

    The parts are, over all processes of the trainer: `import`, the time until the `start` event; `compile`, how much
    longer the first steps took than at the quickest reported speed; `steps`, the other steps at their reported speed
    and the first ones at the quickest; `eval`; and `checkpoint`, the pauses for checkpoints.
    """

    def __init__(self) -> None:
        self._measured_us = dict.fromkeys(("import", "compile", "steps", "eval", "checkpoint"), 0)
        self._began_us: int | None = None
        self._first: tuple[int, int] | None = None  # The first steps: their microseconds and their number.
        self._last_step = 0
        self._quickest_us: int | None = None

    def take(self, event: TrainerEvent) -> None:
        """Add the next event to the figures."""
        match event:
            case StartEvent():
                self._close_process()
                self._began_us, self._last_step = _to_microseconds(event.elapsed_s), event.step or 0
                self._measured_us["import"] += self._began_us
            case StepEvent():
                self._count_step(event)
            case EvaluationEvent():
                self._measured_us["eval"] += _to_microseconds(event.eval_s)
            case CheckpointEvent():
                self._measured_us["checkpoint"] += _to_microseconds(event.stall_s)

    def _count_step(self, event: StepEvent) -> None:
        if self._began_us is None or event.step is None or event.step_s is None or event.elapsed_s is None:
            return
        step_us, elapsed_us = _to_microseconds(event.step_s), _to_microseconds(event.elapsed_s)
        count, self._last_step = max(0, event.step - self._last_step), event.step
        self._quickest_us = step_us if self._quickest_us is None else min(self._quickest_us, step_us)
        if self._first is None:
            self._first = max(0, elapsed_us - self._began_us), count
        else:
            self._measured_us["steps"] += count * step_us

    def _close_process(self) -> None:
        """Add the first steps of the current process of the trainer to the figures, because the process is over."""
        if self._first is not None:
            took_us, count = self._first
            usual_us = min(took_us, count * (self._quickest_us or 0))
            self._measured_us["steps"] += usual_us
            self._measured_us["compile"] += took_us - usual_us
        self._began_us, self._first, self._quickest_us = None, None, None

    def within(self, training_s: float) -> dict[str, float] | None:
        """Divide the training phase: return the seconds of each part, and of the rest as "other".

        None if the parts do not fit in the phase, or if the events have no figures.
        """
        self._close_process()
        measured_ms = {name: us // 1000 for name, us in self._measured_us.items()}
        total_ms = round(1000 * training_s)
        room_ms = total_ms - sum(ms for name, ms in measured_ms.items() if name != "steps")
        if room_ms < 0 or not any(measured_ms.values()):
            return None
        measured_ms["steps"] = min(measured_ms["steps"], room_ms)  # The reported speed is a median, not a sum.
        measured_ms["other"] = total_ms - sum(measured_ms.values())
        return {name: ms / 1000 for name, ms in measured_ms.items()}


def planned_phases(intent: CreateIntended, plan: Mapping[str, Any]) -> Planned:
    """Return the limit of each phase in a rental's lease, and the range of the training time that the plan expected."""
    limits, offers = intent.lease.model_dump(), [plan, *(plan.get("candidates") or ())]
    guess: Any = next((entry.get("estimate") for entry in offers if entry.get("offer") == intent.offer), None)
    return {
        "is": "planned",
        "limits_s": {name: limits[key] for name, key in _LEASE.items() if name != "setup" or limits[key]},
        "training_s": plain_data((guess or {}).get("train_s")),
    }


def timeline(records: Sequence[Record]) -> Timeline:
    """Return the times at which this computer observed each stage: the first request, and the last of all other stages.

    For a run that moved, by rules from END_BY_MACHINE_CLOCK on, the stages up to the start of the training are those of
    its first machine.
    """
    intended = next((record for record in records if record.event is Event.CREATE_INTENDED), None)
    first = by_machine(records)[0] if (opened_of(records).rules or 1) >= END_BY_MACHINE_CLOCK else records

    def seen(event: Event, among: Sequence[Record] = records) -> str:
        record = last_of(among, event) or last_of(records, event)
        return utc(record.wall) if record else UNKNOWN

    return {
        "is": MEASURED,
        "asked": utc(intended.wall) if intended else UNKNOWN,
        "exists": seen(Event.CREATE_OBSERVED, first),
        "ready": seen(Event.READY_OBSERVED, first),
        "shipped": seen(Event.SHIP_OBSERVED, first),
        "train_start": seen(Event.TRAIN_STARTED, first),
        "train_end": UNKNOWN if opened_of(records).imported else seen(Event.TRAIN_OBSERVED),
        "collected": seen(Event.COLLECT_OBSERVED),
        "gone": seen(Event.DEATH_PROVEN),
    }


def _to_microseconds(seconds: float | None) -> int:
    """Convert reported seconds to microseconds; return 0 if they are missing or not plausible."""
    return round(seconds * 1e6) if seconds is not None and 0 <= seconds < 1e12 else 0
