"""Checks a receipt that was made by other rules than this gpurun's for everything that no rules can change.

What the receipt quotes is compared with the run folder. What it computes must be consistent in itself, and must not
contradict the journal: a machine costs no less than the time in which it was seen alive, and is not gone without a
proven end. Because a forger could declare any rules, the warning also names what this gpurun computes differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from gpurun.core.journal_events import CollectObserved
from gpurun.core.journal_records import Record, all_typed, opened_of
from gpurun.core.money import Micros, cost_of, left_of, times, total
from gpurun.core.receipt_record import on_gpu
from gpurun.core.receipt_rules import RULES
from gpurun.ledger.audit.compare import find_differences
from gpurun.ledger.audit.rentals import AuditedRental, Json, is_more_than_journal_tells, split_rentals

_QUOTED = (
    "v", "run", "seq", "prev", "journal", "signing", "asked", "digests", "gpurun", "platform", "instance", "timeline",
    "checkpoint", "teardown",
)  # fmt: skip
_OF_TRAINER = ("outcome", "exit_code", "device", "start", "figures")
_SLACK_S = 2
"""A duration by a provider's times may be too short by this, because they are whole seconds."""
_MOST_NAMED = 4


def note_of(rules: int, unlike: Sequence[str]) -> str:
    """Return the warning about a receipt by other rules; `unlike` are the paths at which today's rules differ."""
    more = f" and {len(unlike) - _MOST_NAMED} more" if len(unlike) > _MOST_NAMED else ""
    shown = ", ".join(path.removeprefix("predicate.") for path in unlike[:_MOST_NAMED])
    otherwise = f"; these differ by rules {RULES}: {shown}{more}" if unlike else ""
    return f"made by rules {rules}, so only its signature, digests, ends and own arithmetic were checked{otherwise}"


def broken_by_any_rules(statement: Json, again: Mapping[str, Any], basis: Sequence[Record]) -> Iterator[str]:
    """Yield the paths at which a statement is wrong by any rules; `again` is the statement by today's rules."""
    stated, made = statement["predicate"], again["predicate"]
    for name in _QUOTED:
        yield from find_differences(made[name], stated.get(name), f"predicate.{name}", keys="common")
    if opened_of(basis).has_model:
        for name in _OF_TRAINER:
            here = f"predicate.training.{name}"
            yield from find_differences(made["training"][name], stated["training"][name], here, keys="common")
    may_say = {made["verdict"]["is"]} | ({"gpu"} if on_gpu(made["verdict"]) else set())
    if on_gpu(stated["verdict"]) and stated["verdict"]["is"] not in may_say:
        yield "predicate.verdict.is"
    files = [{"name": file["name"], "digest": {"sha256": file["sha256"]}} for file in made["checkpoint"]["files"]]
    if any(subject not in files for subject in statement["subject"]):
        yield "subject"
    yield from _find_broken_sums(stated, basis)


def _find_broken_sums(stated: Json, basis: Sequence[Record]) -> Iterator[str]:
    """Yield the paths of totals that are not the sum of their parts, and of parts that contradict the journal."""
    cost, runtime, opened, rentals = stated["cost"], stated["runtime"], opened_of(basis), split_rentals(basis)
    lines, upper = cost["rentals"], cost["upper_bound_micros"]
    if len(lines) != len(rentals):
        yield "predicate.cost.rentals"
        return
    for place, (line, rental) in enumerate(zip(lines, rentals, strict=True)):
        yield from (f"predicate.cost.rentals[{place}].{key}" for key in _find_broken_keys(line, rental))
    parts = [line["micros"] for line in lines]
    may_tell = not opened.imported and not is_more_than_journal_tells(basis) and None not in parts
    if upper is not None and not (may_tell and upper == sum(parts)):
        yield "predicate.cost.upper_bound_micros"
    for key in ("cap_micros", "worst_micros"):
        if cost[key] != getattr(opened, key):
            yield f"predicate.cost.{key}"
    cap = opened.cap_micros
    if cost["cap_kept"] and (upper is None or cap is None or left_of(Micros(cap), upper) < 0):
        yield "predicate.cost.cap_kept"
    seconds = [line["billable_s"] for line in lines]
    if runtime["billable_s"] is not None and not (may_tell and runtime["billable_s"] == _add_exactly(seconds)):
        yield "predicate.runtime.billable_s"
    if runtime["billable_s"] is not None and _add_exactly(runtime["phases_s"].values()) != runtime["billable_s"]:
        yield "predicate.runtime.phases_s"
    division = (runtime.get("training") or {}).get("seconds")
    if division and _add_exactly(division.values()) != runtime["phases_s"].get("training"):
        yield "predicate.runtime.training.seconds"


def _find_broken_keys(line: Json, rental: AuditedRental) -> Iterator[str]:
    """Yield the keys of a rental's entry that contradict the journal or each other."""
    facts = rental.facts
    quoted = rental.intent.model_dump(include={"attempt", "token", "billing_unit_s"}) | {"end": rental.end}
    yield from (key for key, value in quoted.items() if line[key] != value)
    yield from (key for key in ("rate_micros_per_hour", "machines") if line[key] < facts[key])
    seconds, micros = line["billable_s"], line["micros"]
    if seconds is None or micros is None or rental.is_open:
        yield from (key for key in ("billable_s", "micros") if line[key] is not None)
        return
    least, most = _bound_seconds(rental)
    if not least - _SLACK_S <= seconds <= most:
        yield "billable_s"
    rate, unit_s = line["rate_micros_per_hour"], line["billing_unit_s"]
    rises = list(rental.rises_from(rate))
    risen = line.get("price_rose", [])
    rates = [fact["rate_micros_per_hour"] for fact in risen]
    longest = [seconds - float(rise.at) for rise in rises]  # Each price rose before its incident was recorded.
    if rates != [rise.rate for rise in rises] or any(
        not max(0.0, least_s) <= rise["billable_s"] + 0.001 <= seconds + 0.002
        for rise, least_s in zip(risen, longest, strict=True)
    ):
        yield "price_rose"
        return
    extras, known = line.get("extras", []), [(extra["id"], extra["ended"]) for extra in facts.get("extras", [])]
    if [(extra["id"], extra["ended"]) for extra in extras] != known or any(
        extra["micros"] != rental.lasting(rate, extra["billable_s"]) for extra in extras
    ):
        yield "extras"
    dearer = [cost_of(rise.more, fact["billable_s"], unit_s) for rise, fact in zip(rises, risen, strict=True)]
    own = total(rental.lasting(rate, seconds), *dearer)
    beside = total(*(Micros(extra["micros"]) for extra in extras))
    if micros not in {
        total(times(total(own, once), line["machines"]), beside) for once in _list_egress_costs(rental, seconds)
    }:
        yield "micros"


def _list_egress_costs(rental: AuditedRental, seconds: float) -> set[Micros]:
    """Return all possible costs of the data that left the machine: as counted, as planned, or 0."""
    sent = [collected.egress_micros for collected in all_typed(rental.records, CollectObserved)]
    counted = [count for count in sent if count is not None]
    planned = rental.intent.egress_micros
    may_be = {counted[-1], max(counted[-1], planned)} if counted else {planned, 0}
    return {Micros(amount) for amount in may_be} if seconds else {Micros(0)}


def _bound_seconds(rental: AuditedRental) -> tuple[float, float]:
    """Return the seconds in which a machine was seen alive, and the most seconds for which it can have existed."""
    if rental.end == "refused":
        return 0.0, 0.0
    lives = rental.lives
    begun = rental.starts if rental.intent.lease.queue_s else lives[:1]
    seen = max(lives) - max(begun) if lives and begun else Decimal(0)
    return float(seen), float(rental.clock.between(rental.records[0], rental.records[-1]))


def _add_exactly(seconds: Any) -> float:
    """Return the sum of seconds, added exactly as they are written."""
    return float(sum((Decimal(str(part_s)) for part_s in seconds), Decimal(0)))
