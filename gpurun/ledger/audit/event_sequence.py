"""Checks that a journal tells a story that can have happened: every record has what must come before it.

The hash chain shows that a journal was not edited; this shows that it was not made up, or reordered and chained again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpurun.core.journal_records import Event
from gpurun.core.money import Micros, cost_of, total
from gpurun.core.records import Teardown, digest_of
from gpurun.ledger.audit.strict_lines import KNOWN, Json

# What must have been recorded for the same machine before.
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
# What is done beside the machine: before one is asked for, or after its end.
_BESIDE: dict[str, str] = {
    Event.STAGE_INTENDED: Event.RUN_OPENED,
    Event.STAGE_OBSERVED: Event.STAGE_INTENDED,
    Event.BILL_OBSERVED: Event.DEATH_PROVEN,
    Event.SALVAGE_INTENDED: Event.DEATH_PROVEN,
    Event.SALVAGE_OBSERVED: Event.SALVAGE_INTENDED,
}
# The events of an imported run: nothing was asked for, and it came as one file.
_IMPORTED: dict[str, str] = {Event.TRAIN_OBSERVED: Event.RUN_OPENED, Event.COLLECT_OBSERVED: Event.TRAIN_OBSERVED}
# How many reads, over how many seconds, each kind of end needs (docs/RECEIPTS.md).
_PROOF: dict[str, tuple[int, float]] = {
    Teardown.DESTROYED: (3, 30.0),
    Teardown.PROCESSES_KILLED_HOST_KEPT: (1, 0.0),
    Teardown.RELEASED: (3, 10.0),
    Teardown.STOPPED_DISK_BILLED: (1, 0.0),
    Teardown.EXPIRES_AT: (1, 0.0),
    Teardown.USER_OPERATED: (1, 0.0),
}
_CLOCK_SLACK_S = 5.0
_BILL_GAP_S = 600.0


def open_token(records: Sequence[Json]) -> str | None:
    """The token of a machine that was asked for and neither refused nor proven gone."""
    token = None
    for record in records:
        if record["event"] == Event.CREATE_INTENDED:
            token = str(record["data"].get("token"))
        elif record["event"] in (Event.CREATE_REFUSED, Event.DEATH_PROVEN):
            token = None
    return token


def unended(records: Sequence[Json]) -> tuple[set[str], set[str]]:
    """The ids of machines beside a run's own, or that came late, and the tokens that left something billed.

    Only those that are not gone since; the proof that nothing has a token any more is one for all of its machines.
    """
    late: dict[str, str] = {}
    billed: set[str] = set()
    token = ""
    for record in records:
        if record["event"] == Event.CREATE_INTENDED:
            token = str(record["data"].get("token"))
        if record["event"] == Event.DEATH_PROVEN:
            late = {name: its for name, its in late.items() if its != token}
        data = record["data"] if record["event"] == Event.INCIDENT else {}
        match data.get("code"):
            case "create.late" | "create.duplicate" if data.get("id") or data["code"] == "create.late":
                late[str(data.get("id"))] = str(data.get("token"))
            case "create.late_gone" | "create.duplicate_gone":
                late.pop(str(data.get("id")), None)
            case "leftover" if data.get("billed") is True:
                billed.add(str(data.get("token")))
            case "leftover_gone":
                billed.discard(str(data.get("token")))
    return set(late), billed


def order_problems(records: Sequence[Json]) -> Iterator[str]:
    """What cannot have happened in the order that the journal tells; what a newer gpurun added to it is passed over."""
    records = [record for record in records if record["event"] in KNOWN]
    imported = bool(records) and bool(records[0]["data"].get("imported"))
    beside = _BESIDE | (_IMPORTED if imported else {})
    rental: list[Json] = []
    tokens: set[str] = set()
    for place, record in enumerate(records):
        event, at = record["event"], f"journal line {record['seq']}, {record['event']}:"
        if (event == Event.RUN_OPENED) != (place == 0):
            yield f"{at} a run is opened once, first of all"
        yield from (f"{at} {problem}" for problem in _clock_problems(records, place))
        if imported and event in (_NEEDS.keys() | {Event.CREATE_INTENDED}) - _IMPORTED.keys():
            yield f"{at} nothing is rented for a run that was imported"
        elif event == Event.CREATE_INTENDED:
            if rental and not _is_over(rental):
                yield f"{at} a second machine was asked for before the first was proven gone"
            if record["data"]["token"] in tokens:
                yield f"{at} the token was used before"
            tokens.add(record["data"]["token"])
            rental = [record]
            yield from (f"{at} {problem}" for problem in _intent_problems(record, records[0]))
        elif event in _NEEDS and event not in beside:
            yield from (f"{at} {problem}" for problem in _rental_problems(record, rental))
            rental.append(record)
        elif event in beside:
            if not any(before["event"] == beside[event] for before in records[:place]):
                yield f"{at} there was no {beside[event]} before it"
            if event == Event.BILL_OBSERVED:
                yield from (f"{at} {problem}" for problem in _bill_problems(record, tokens))
        elif event in (Event.RECEIPT_OBSERVED, Event.RUN_CLOSED):
            yield from (f"{at} {problem}" for problem in _end_problems(records, place))


def _is_over(rental: Sequence[Json]) -> bool:
    return any(record["event"] in (Event.CREATE_REFUSED, Event.DEATH_PROVEN) for record in rental)


def _clock_problems(records: Sequence[Json], place: int) -> Iterator[str]:
    """Monotonic time never runs back within one boot."""
    before = records[place - 1] if place else None
    here = records[place]
    if before is not None and before["boot_id"] == here["boot_id"] and here["mono"] < before["mono"]:
        yield "it happened before the record that it follows"


def _intent_problems(intent: Json, opened: Json) -> Iterator[str]:
    """The promises that are made before anything is asked for: worst case, cap and deadline."""
    data, lease = intent["data"], intent["data"]["lease"]
    lease_s = sum(lease[part] for part in ("boot_s", "ship_s", "train_s", "collect_s", "destroy_s"))
    lease_s += lease.get("setup_s", 0)  # Older leases had no part of its own for that.
    queue_s = lease.get("queue_s", 0)
    rate, unit_s = Micros(data["rate_micros_per_hour"]), data["billing_unit_s"]
    longest_s, once = lease_s + lease["kill_allowance_s"], Micros(data.get("egress_micros", 0))
    hourly = Micros(data.get("beside_micros_per_hour", 0))
    if total(cost_of(rate, longest_s, unit_s), cost_of(hourly, longest_s, unit_s), once) > data["worst_micros"]:
        yield "the worst case is less than the lease costs"
    cap = opened["data"]["cap_micros"]
    if cap is not None and data["worst_micros"] > cap:
        yield "the worst case is over the cap"
    if data["deadline_wall"] - intent["wall"] > queue_s + lease_s + _CLOCK_SLACK_S:
        yield "the deadline is later than the lease allows"


def _rental_problems(record: Json, rental: Sequence[Json]) -> Iterator[str]:
    event, data = record["event"], record["data"]
    if not rental:
        yield "there was no intent to create before it"
        return
    if _is_over(rental):
        yield "the machine was refused or proven gone before it"
    if not any(before["event"] == _NEEDS[event] for before in rental):
        yield f"there was no {_NEEDS[event]} before it"
    token = rental[0]["data"]["token"]
    named = [data["token"]] if "token" in data else []
    named += [data["instance"]["token"]] if data.get("instance") else []
    if any(name != token for name in named):
        yield "it is about another machine than the one asked for"
    if event == Event.CREATE_REFUSED and any(before["event"] == Event.CREATE_OBSERVED for before in rental):
        yield "a machine that was seen cannot have been refused"
    if event == Event.SHIP_INTENDED and _price_rose(rental):
        yield "it went on although the machine costs more than was agreed to"
    if event == Event.DEATH_PROVEN:
        yield from death_problems(record, rental)


def _bill_problems(bill: Json, tokens: set[str]) -> Iterator[str]:
    """A bill counts that was read twice, some time apart, with the same amount."""
    data = bill["data"]
    if data["token"] not in tokens:
        yield "it is the bill of a machine that was not asked for"
    if data["reads"] < 2 or data["spread_s"] < _BILL_GAP_S:
        yield "the bill was not read twice, ten minutes apart"


def _price_rose(rental: Sequence[Json]) -> bool:
    agreed = rental[0]["data"]["rate_micros_per_hour"]
    told = [(record["data"].get("instance") or {}).get("rate_micros_per_hour") for record in rental]
    return any(rate is not None and rate > agreed for rate in told)


def death_problems(proof: Json, rental: Sequence[Json]) -> Iterator[str]:
    """Whether the reads since the last asking carry the claim: enough of them, all GONE and unlisted, far apart."""
    data = proof["data"]
    if data["teardown"] not in _PROOF:
        yield f"{data['teardown']!r} is no proven end"
        return
    asked = max(place for place, record in enumerate(rental) if record["event"] == Event.DESTROY_ASKED)
    reads = [record["data"] for record in rental[asked:] if record["event"] == Event.DEATH_READ]
    counted = reads[-data["reads"] :] if data["reads"] > 0 else []
    least_reads, least_s = _PROOF[data["teardown"]]
    if len(counted) != data["reads"] or data["reads"] < least_reads:
        yield f"{data['reads']} reads are claimed, {len(reads)} are recorded, {least_reads} are needed"
    if any(read["state"] != "GONE" or read["listed"] or read["id"] != data["id"] for read in counted):
        yield "not every read shows the machine gone and unlisted"
    since = rental[asked]
    window_s = max(proof["wall"] - since["wall"], proof["mono"] - since["mono"])
    if data["spread_s"] < least_s or data["spread_s"] > window_s + _CLOCK_SLACK_S:
        yield f"the reads are claimed to be {data['spread_s']} s apart, which they are not, or not enough"
    if counted and all("at_s" in read for read in counted):
        if round(counted[-1]["at_s"] - counted[0]["at_s"], 3) != data["spread_s"]:
            yield f"the reads are claimed to be {data['spread_s']} s apart, and their own times say otherwise"
        taken = [[read["at_s"], read["state"], read["listed"], read["answer_sha256"]] for read in counted]
        if digest_of(taken) != data["evidence_sha256"]:
            yield "the evidence is not the digest of the reads"


def _end_problems(records: Sequence[Json], place: int) -> Iterator[str]:
    """A receipt and a close come once, in this order, when no machine is left."""
    event, before = records[place]["event"], [record["event"] for record in records[:place]]
    if event in before:
        yield "it is there twice"
    late, billed = unended(records[:place])
    if open_token(records[:place]) is not None or late:
        yield "the machine was not proven gone before it"
    if billed:
        yield "what was billed beside the machine was not gone before it"
    if event == Event.RUN_CLOSED:
        if Event.RECEIPT_OBSERVED not in before:
            yield "there was no receipt before it"
        if records[place]["data"]["exit_code"] == 0 and _has_failed(records[:place]):
            yield "a run in which a step failed cannot have ended well"
        return
    if Event.RUN_CLOSED in before:
        yield "the run was closed before it"


def _has_failed(records: Sequence[Json]) -> bool:
    """Whether a step failed, but for a collect of which all came home while the machine was held."""
    failed = [(place, record) for place, record in enumerate(records) if record["event"] == Event.STEP_FAILED]
    held = [place for place, record in enumerate(records) if record["event"] == Event.HOLD_INTENDED]
    mended = [place for place in _collected(records) if held and place > held[-1]]
    return any(record["data"]["step"] != "collect" or not mended or place > mended[-1] for place, record in failed)


def _collected(records: Sequence[Json]) -> list[int]:
    """The places of the records by which all that was finished is at home."""
    collected = (place for place, record in enumerate(records) if record["event"] == Event.COLLECT_OBSERVED)
    return [place for place in collected if not records[place]["data"]["missing"]]
