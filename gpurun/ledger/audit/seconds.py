"""Derives once more where the paid seconds went, for the audit alone: in decimals, and from whole lists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal, localcontext
from itertools import pairwise
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


def training_of(told: Sequence[Json], training_s: float) -> Json | None:
    """How the machine divides the training phase; nothing where it claims more than there was."""
    with localcontext(prec=_DIGITS):
        return _divided(told, Decimal(str(training_s)))


def _divided(told: Sequence[Json], total: Decimal) -> Json | None:
    starts = [place for place, event in enumerate(told) if event.get("kind") == "start"]
    sums = dict.fromkeys(("import", "compile", "steps"), _NOTHING)
    for first, after in pairwise([*starts, len(told)]):
        _one_process(told[first], told[first + 1 : after], sums)
    for name, kind, key in (("eval", "eval", "eval_s"), ("checkpoint", "checkpoint", "stall_s")):
        amounts = [_amount(event.get(key)) for event in told if event.get("kind") == kind]
        sums[name] = sum((amount for amount in amounts if amount is not None), _NOTHING)
    cut = {name: seconds.quantize(_MILLI, rounding=ROUND_FLOOR) for name, seconds in sums.items()}
    room = total - sum(seconds for name, seconds in cut.items() if name != "steps")
    if room < 0 or not sum(cut.values()):
        return None
    cut["steps"] = min(cut["steps"], room)
    return {name: float(seconds) for name, seconds in {**cut, "other": total - sum(cut.values())}.items()}


def _one_process(start: Json, rest: Sequence[Json], sums: dict[str, Decimal]) -> None:
    """Add what one process of the trainer tells between its start and the next one's."""
    began = _amount(start.get("elapsed_s")) or _NOTHING
    sums["import"] += began
    lines = []
    for event in rest:
        figures = (_count(event.get("step")), _amount(event.get("step_s")), _amount(event.get("elapsed_s")))
        if event.get("kind") == "step" and None not in figures:
            lines.append(figures)
    if not lines:
        return
    steps = [_count(start.get("step")) or 0, *(line[0] or 0 for line in lines)]
    counts = [max(0, steps[place + 1] - steps[place]) for place in range(len(lines))]
    took = max(_NOTHING, (lines[0][2] or _NOTHING) - began)
    usual = min(took, counts[0] * min(line[1] or _NOTHING for line in lines))
    later = sum(((line[1] or _NOTHING) * count for line, count in zip(lines[1:], counts[1:], strict=True)), _NOTHING)
    sums["compile"] += took - usual
    sums["steps"] += usual + later


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
