"""Derives once more where the paid seconds went, for the audit alone: in decimals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal, localcontext
from typing import Any

from gpurun.core.paths import RunFolder
from gpurun.ledger.audit.lines import Json
from gpurun.ledger.audit.rentals import passed
from gpurun.ledger.untrusted import plain_data

_STARTS = {
    "boot": ("create.intended",),
    "upload": ("ready.observed",),
    "training": ("ship.observed",),
    "collect": ("train.observed", "collect.intended"),
    "destroy": ("collect.observed", "destroy.intended"),
    "other": ("step.failed",),
}
_UNDER_WAY = {event: phase for phase, events in _STARTS.items() for event in events}
_TOLD_BY = {"connect": ("ready.observed", "boot", "connect_s"), "unpack": ("ship.observed", "upload", "unpack_s")}
_LEASE = {"boot": "boot_s", "upload": "ship_s", "training": "train_s", "collect": "collect_s", "destroy": "destroy_s"}
_STALLS = {"eval": "eval_s", "checkpoint": "stall_s"}
# A hostile machine's figures are large, and there may be many.
_DIGITS = 100
_MILLI, _MICRO, _NOTHING = Decimal("0.001"), Decimal("0.000001"), Decimal(0)


def phases_of(rentals: Sequence[Sequence[Json]], facts: Sequence[Json]) -> Json:
    """Seconds of each phase over all rentals, and the rest."""
    found: dict[str, Decimal] = {}
    for rental, fact in zip(rentals, facts, strict=True):
        for name, seconds in [] if fact["end"] == "refused" else _of_one(rental).items():
            found[name] = found.get(name, _NOTHING) + seconds.quantize(_MILLI, rounding=ROUND_FLOOR)
    billable = sum((Decimal(str(fact["billable_s"])) for fact in facts), _NOTHING)
    known = {name: seconds for name, seconds in found.items() if name != "other"}
    return {name: float(seconds) for name, seconds in {**known, "other": billable - sum(known.values())}.items()}


def _of_one(rental: Sequence[Json]) -> dict[str, Decimal]:
    proofs = [place for place, record in enumerate(rental) if record["event"] == "death.proven"]
    lived = rental[: proofs[-1] + 1] if proofs else rental
    found: dict[str, Decimal] = {}
    name = "boot"
    for place in range(1, len(lived)):
        name = _UNDER_WAY.get(lived[place - 1]["event"], name)
        found[name] = found.get(name, _NOTHING) + passed(lived[place - 1], lived[place])
        for part, (event, whole, key) in _TOLD_BY.items():
            told = _amount(lived[place]["data"].get(key)) if lived[place]["event"] == event else None
            taken = min(told or _NOTHING, found.get(whole, _NOTHING))
            if taken:
                found |= {whole: found[whole] - taken, part: found.get(part, _NOTHING) + taken}
    return found


def training_of(told: Iterable[Json], training_s: float) -> Json | None:
    """How the machine divides the training phase; nothing where it claims more than there was."""
    with localcontext(prec=_DIGITS):
        return _divided(told, Decimal(str(training_s)))


def _divided(told: Iterable[Json], total: Decimal) -> Json | None:
    sums = dict.fromkeys(("import", "compile", "steps", *_STALLS), _NOTHING)
    process: _Process | None = None
    for event in told:
        if event.get("kind") == "start":
            _add(process, sums)
            process = _Process(_amount(event.get("elapsed_s")) or _NOTHING, _count(event.get("step")) or 0)
        elif event.get("kind") == "step" and process is not None:
            process.hear(event)
        for name, key in _STALLS.items():
            sums[name] += (_amount(event.get(key)) or _NOTHING) if event.get("kind") == name else _NOTHING
    _add(process, sums)
    cut = {name: seconds.quantize(_MILLI, rounding=ROUND_FLOOR) for name, seconds in sums.items()}
    room = total - sum(seconds for name, seconds in cut.items() if name != "steps")
    if room < 0 or not sum(cut.values()):
        return None
    cut["steps"] = min(cut["steps"], room)
    return {name: float(seconds) for name, seconds in {**cut, "other": total - sum(cut.values())}.items()}


@dataclass
class _Process:
    """One process of the trainer, from its start to the next one's: never more than this is kept of its events."""

    began: Decimal
    step: int
    first: tuple[Decimal, int] | None = None
    quickest: Decimal = _NOTHING
    later: Decimal = _NOTHING

    def hear(self, event: Json) -> None:
        """A line about steps; the first one also says how long all before it took."""
        step, each, at = _count(event.get("step")), _amount(event.get("step_s")), _amount(event.get("elapsed_s"))
        if step is None or each is None or at is None:
            return
        count, self.step = max(0, step - self.step), step
        if self.first is None:
            self.first, self.quickest = (max(_NOTHING, at - self.began), count), each
        else:
            self.quickest, self.later = min(self.quickest, each), self.later + each * count


def _add(process: _Process | None, sums: dict[str, Decimal]) -> None:
    """Add what a process told, now that it has told everything."""
    if process is None:
        return
    sums["import"] += process.began
    if process.first is not None:
        took, count = process.first
        usual = min(took, count * process.quickest)
        sums["compile"] += took - usual
        sums["steps"] += usual + process.later


def planned_of(folder: RunFolder, rentals: Sequence[Sequence[Json]], facts: Sequence[Json]) -> Json | None:
    """What the plan had for the last machine that was rented."""
    intents = [rental[0]["data"] for rental, fact in zip(rentals, facts, strict=True) if fact["end"] != "refused"]
    if not intents:
        return None
    try:
        plan: Any = json.loads(folder.plan.read_bytes())
    except (OSError, ValueError):
        plan = {}
    candidates = [plan, *(plan.get("candidates") or [])] if isinstance(plan, dict) else []
    guesses = [one.get("estimate") for one in candidates if one.get("offer") == intents[-1]["offer"]]
    expected = (guesses[0] or {}).get("train_s") if guesses else None
    limits = {name: intents[-1]["lease"][key] for name, key in _LEASE.items()}
    return {"is": "planned", "limits_s": limits, "training_s": plain_data(expected)}


def _amount(value: Any) -> Decimal | None:
    """Seconds to the microsecond, if somebody told sane ones."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        return None
    return Decimal(value * 1e6).quantize(Decimal(1), rounding=ROUND_HALF_EVEN) * _MICRO


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None
