"""Checks that the events of a journal can have happened in this order: most events need certain events before them.

The hash chain shows that a journal was not edited. These checks find journals that were invented, or reordered and then
chained again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpurun.core.journal_events import (
    BillObserved,
    CreateIntended,
    DeathProven,
    DeathRead,
    Incident,
    LegPlanned,
    RunOpened,
)
from gpurun.core.journal_records import Event, Record, all_typed
from gpurun.core.money import Micros, cost_of, total
from gpurun.core.records import Teardown, digest_json
from gpurun.ledger.audit.rentals import gpu_hours, measured_gpu_hours, measured_micros

# For each event, the event that must have been recorded before it for the same machine.
_NEEDS: dict[str, str] = {
    Event.CREATE_OBSERVED: Event.CREATE_INTENDED,
    Event.CREATE_REFUSED: Event.CREATE_INTENDED,
    Event.CREATE_UNKNOWN: Event.CREATE_INTENDED,
    Event.READY_OBSERVED: Event.CREATE_OBSERVED,
    Event.SHIP_INTENDED: Event.READY_OBSERVED,
    Event.SHIP_OBSERVED: Event.SHIP_INTENDED,
    Event.TRAIN_INTENDED: Event.SHIP_OBSERVED,
    Event.TRAIN_STARTED: Event.TRAIN_INTENDED,
    Event.RATE_OBSERVED: Event.TRAIN_STARTED,
    Event.TRAIN_OBSERVED: Event.TRAIN_STARTED,
    Event.COLLECT_INTENDED: Event.TRAIN_STARTED,
    Event.COLLECT_OBSERVED: Event.COLLECT_INTENDED,
    Event.HOLD_INTENDED: Event.COLLECT_INTENDED,
    Event.HOLD_OBSERVED: Event.HOLD_INTENDED,
    Event.DESTROY_INTENDED: Event.CREATE_INTENDED,
    Event.DESTROY_ASKED: Event.DESTROY_INTENDED,
    Event.DEATH_READ: Event.DESTROY_ASKED,
    Event.DEATH_PROVEN: Event.DEATH_READ,
}
# The same for events outside of a rental: before a machine is requested, or after its end.
_OUTSIDE_RENTAL: dict[str, str] = {
    Event.STAGE_INTENDED: Event.RUN_OPENED,
    Event.STAGE_OBSERVED: Event.STAGE_INTENDED,
    Event.BILL_OBSERVED: Event.DEATH_PROVEN,
    Event.SALVAGE_INTENDED: Event.DEATH_PROVEN,
    Event.SALVAGE_OBSERVED: Event.SALVAGE_INTENDED,
}
# The same for events of an imported run, for which no machine was requested.
_IMPORTED: dict[str, str] = {Event.TRAIN_OBSERVED: Event.RUN_OPENED, Event.COLLECT_OBSERVED: Event.TRAIN_OBSERVED}
# How many readings, over how many seconds, each kind of end needs (docs/RECEIPTS.md).
_PROOF: dict[str, tuple[int, float]] = {
    Teardown.DESTROYED: (3, 30.0),
    Teardown.PROCESSES_KILLED_HOST_KEPT: (1, 0.0),
    Teardown.RELEASED: (3, 10.0),
    Teardown.STOPPED_DISK_BILLED: (1, 0.0),
    Teardown.EXPIRES_AT: (1, 0.0),
    Teardown.USER_OPERATED: (1, 0.0),
}
_ENDS_RENTAL = {Event.CREATE_REFUSED, Event.DEATH_PROVEN}
_CLOCK_SLACK_S = 5.0
_BILL_GAP_S = 600.0
_ROUNDED = 1e-6
"""The most by which two sums of the same fractions of an hour may differ."""


def is_rented(records: Sequence[Record]) -> bool:
    """Return whether the last machine that was requested is neither refused nor proven gone."""
    turns = _ENDS_RENTAL | {Event.CREATE_INTENDED}
    return next((record.event == Event.CREATE_INTENDED for record in reversed(records) if record.event in turns), False)


def find_unended(records: Sequence[Record]) -> tuple[set[str], set[str]]:
    """Return the ids of extra machines that are not proven gone, and the tokens that still have a billed leftover.

    A proof of death for a token covers all machines with that token.
    """
    late: dict[str, str] = {}
    billed: set[str] = set()
    token: str | None = None
    for record in records:
        match record.typed:
            case CreateIntended(token=token):
                pass
            case DeathProven():
                late = {name: its for name, its in late.items() if its != token}
            case Incident(code="create.late") as late_one:
                late[late_one.id] = late_one.token
            case Incident(code="create.duplicate") as double if double.id:
                late[double.id] = double.token
            case Incident(code="create.late_gone" | "create.duplicate_gone") as gone:
                late.pop(gone.id, None)
            case Incident(code="leftover", billed=True) as left:
                billed.add(left.token)
            case Incident(code="leftover_gone") as left:
                billed.discard(left.token)
    return set(late), billed


def order_problems(records: Sequence[Record]) -> Iterator[str]:
    """Yield the problems in the order of a journal's records. Events that only a newer gpurun knows are skipped."""
    records = [record for record in records if isinstance(record.event, Event)]
    opened = records[0].typed if records else None
    imported = isinstance(opened, RunOpened) and bool(opened.imported)
    beside = _OUTSIDE_RENTAL | (_IMPORTED if imported else {})
    rental: list[Record] = []
    rented, before = set[str](), set[str]()
    tokens: set[str] = set()
    legs = 1
    for place, record in enumerate(records):
        event, at = record.event, f"journal line {record.seq}, {record.event}:"
        if (event == Event.RUN_OPENED) != (place == 0):
            yield f"{at} a run is opened once, by its first record"
        if place and records[place - 1].boot_id == record.boot_id and record.mono < records[place - 1].mono:
            yield f"{at} it happened before the record that it follows"
        if imported and event in (_NEEDS.keys() | {Event.CREATE_INTENDED}) - _IMPORTED.keys():
            yield f"{at} nothing is rented for an imported run"
        elif isinstance(intent := record.typed, CreateIntended):
            if rented and not rented & _ENDS_RENTAL:
                yield f"{at} a second machine was requested before the first was proven gone"
            if intent.token in tokens:
                yield f"{at} the token was used before"
            tokens.add(intent.token)
            rental, rented = [record], {event}
            yield from (f"{at} {problem}" for problem in _intent_problems(record, intent, opened))
            if legs > 1:
                yield from (f"{at} {problem}" for problem in _cap_problems(intent, opened, records[:place]))
        elif event in _NEEDS and event not in beside:
            yield from (f"{at} {problem}" for problem in _rental_problems(record, rental, rented))
            rental.append(record)
            rented.add(event)
        elif event in beside:
            if beside[event] not in before:
                yield f"{at} there was no {beside[event]} before it"
            if isinstance(bill := record.typed, BillObserved):
                yield from (f"{at} {problem}" for problem in _bill_problems(bill, tokens))
        elif isinstance(leg := record.typed, LegPlanned):
            legs += 1 if leg.token else 0
            is_over = not rented or bool(rented & _ENDS_RENTAL)
            yield from (f"{at} {problem}" for problem in _leg_problems(leg, opened, records[:place], legs, is_over))
        elif event in (Event.RECEIPT_OBSERVED, Event.RUN_CLOSED):
            yield from (f"{at} {problem}" for problem in _end_problems(record, records[:place], before))
        before.add(event)


def _intent_problems(record: Record, intent: CreateIntended, opened: object) -> Iterator[str]:
    """Check the figures of a create intent: worst case, cap and deadline."""
    lease, unit_s = intent.lease, intent.billing_unit_s
    longest_s, once = lease.total_s + lease.kill_allowance_s, Micros(intent.egress_micros)
    rates = (Micros(intent.rate_micros_per_hour), Micros(intent.beside_micros_per_hour))
    if total(*(cost_of(rate, longest_s, unit_s) for rate in rates), once) > intent.worst_micros:
        yield "the worst case is less than the lease costs"
    cap = opened.cap_micros if isinstance(opened, RunOpened) else None
    if cap is not None and intent.worst_micros > cap:
        yield "the worst case is over the cap"
    if intent.deadline_wall - record.wall > lease.queue_s + lease.total_s + _CLOCK_SLACK_S:
        yield "the deadline is later than the lease allows"


def _leg_problems(leg: LegPlanned, opened: object, before: Sequence[Record], legs: int, is_over: bool) -> Iterator[str]:
    """Check the plan of a further machine: the run must allow it, and the machine before must be proven gone.

    `legs` is the machine's number, `is_over` whether the rental before it has ended.
    """
    late, billed = find_unended(before)
    if not is_over or late or billed:
        yield "the machine before it was not proven gone"
    if not isinstance(opened, RunOpened) or legs > opened.legs:
        yield "the run was not allowed to continue on so many machines"
    if leg.number != legs:
        yield f"it is called machine {leg.number} of the run, but it is machine {legs}"
    tokens = {intent.token for intent in all_typed(before, CreateIntended)}
    if leg.token and leg.token not in tokens:
        yield "it follows a machine that was not requested"


def _cap_problems(intent: CreateIntended, opened: object, before: Sequence[Record]) -> Iterator[str]:
    """Check that the caps covered the worst case of a further machine after what the machines before it had used."""
    cap = opened.cap_micros if isinstance(opened, RunOpened) else None
    spent = measured_micros(before)
    if cap is not None and spent is not None and total(spent, Micros(intent.worst_micros)) > cap:
        yield "what it could cost was more than the machines before it had left of the cap"
    most = opened.max_gpu_hours if isinstance(opened, RunOpened) else None
    longest_s = intent.lease.total_s + intent.lease.kill_allowance_s
    if most is not None and measured_gpu_hours(before) + gpu_hours(intent, longest_s) > most + _ROUNDED:
        yield "what it could take was more GPU-hours than the machines before it had left of the cap"


def _rental_problems(record: Record, rental: Sequence[Record], rented: set[str]) -> Iterator[str]:
    """Check a record of a rental, given the rental's earlier records and their events (`rented`)."""
    event = record.event
    intent = rental[0].typed if rental else None
    if not isinstance(intent, CreateIntended):
        yield "there was no intent to create before it"
        return
    if rented & _ENDS_RENTAL:
        yield "the machine was refused or proven gone before it"
    if _NEEDS[event] not in rented:
        yield f"there was no {_NEEDS[event]} before it"
    machine = record.typed.instance
    if {getattr(record.typed, "token", ""), machine.token if machine else ""} - {"", intent.token}:
        yield "it is about another machine than the requested one"
    if event == Event.CREATE_REFUSED and Event.CREATE_OBSERVED in rented:
        yield "a machine that was seen cannot have been refused"
    if event == Event.SHIP_INTENDED and _has_price_risen(intent, rental):
        yield "it continued although the machine costs more than was agreed to"
    if isinstance(proof := record.typed, DeathProven):
        yield from _death_problems(record, proof, rental)


def _bill_problems(bill: BillObserved, tokens: set[str]) -> Iterator[str]:
    """Check a bill: it counts only if two readings, at least ten minutes apart, gave the same amount."""
    if bill.token not in tokens:
        yield "it is the bill of a machine that was not requested"
    if bill.reads < 2 or bill.spread_s < _BILL_GAP_S:
        yield "the bill was not read twice, ten minutes apart"


def _has_price_risen(intent: CreateIntended, rental: Sequence[Record]) -> bool:
    rates = [record.typed.instance.rate_micros_per_hour for record in rental if record.typed.instance]
    return any(rate is not None and rate > intent.rate_micros_per_hour for rate in rates)


def _death_problems(record: Record, proof: DeathProven, rental: Sequence[Record]) -> Iterator[str]:
    """Check that the readings since the last destroy request suffice as a proof of death.

    There must be enough of them, over enough time, and all that count must show the machine as gone and not listed.
    """
    if proof.teardown not in _PROOF:
        yield f"{str(proof.teardown)!r} is not a proven end"
        return
    asked_at = max(place for place, record in enumerate(rental) if record.event == Event.DESTROY_ASKED)
    reads = [record.typed for record in rental[asked_at:] if isinstance(record.typed, DeathRead)]
    counted = reads[-proof.reads :] if proof.reads > 0 else []
    least_reads, least_s = _PROOF[proof.teardown]
    if len(counted) != proof.reads or proof.reads < least_reads:
        yield f"{proof.reads} reads are claimed, {len(reads)} are recorded, {least_reads} are needed"
    if any(read.state != "GONE" or read.listed or read.id != proof.id for read in counted):
        yield "not every read shows the machine gone and unlisted"
    since = rental[asked_at]
    window_s = max(record.wall - since.wall, record.mono - since.mono)
    if proof.spread_s < least_s or proof.spread_s > window_s + _CLOCK_SLACK_S:
        yield f"the reads are claimed to be {proof.spread_s} s apart, which is false or not enough"
    times = [read.at_s for read in counted if read.at_s is not None]
    if times and len(times) == len(counted):
        if round(times[-1] - times[0], 3) != proof.spread_s:
            yield f"the reads are claimed to be {proof.spread_s} s apart, but their own times differ"
        taken = [[read.at_s, read.state, read.listed, read.answer_sha256] for read in counted]
        if digest_json(taken) != proof.evidence_sha256:
            yield "the evidence is not the digest of the reads"


def _end_problems(record: Record, earlier: Sequence[Record], before: set[str]) -> Iterator[str]:
    """Check a record of receipt or close: each comes once, in this order, when all machines are proven gone.

    `earlier` are the records before it, `before` their events.
    """
    if record.event in before:
        yield "it occurs twice"
    late, billed = find_unended(earlier)
    if is_rented(earlier) or late:
        yield "the machine was not proven gone before it"
    if billed:
        yield "what was billed beside the machine was not gone before it"
    if record.event == Event.RUN_CLOSED and Event.RECEIPT_OBSERVED not in before:
        yield "there was no receipt before it"
    if record.event == Event.RECEIPT_OBSERVED and Event.RUN_CLOSED in before:
        yield "the run was closed before it"
