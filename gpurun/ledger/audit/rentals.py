"""Derives each rental's machine, seconds, money and end from the raw journal, for the audit alone."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal

from gpurun.core.clock import utc
from gpurun.core.money import Micros, cost_of, times, total
from gpurun.ledger.audit.lines import Json
from gpurun.ledger.untrusted import plain_data

MILESTONES = {
    "asked": "create.intended",
    "exists": "create.observed",
    "ready": "ready.observed",
    "shipped": "ship.observed",
    "train_start": "train.started",
    "train_end": "train.observed",
    "collected": "collect.observed",
    "gone": "death.proven",
}


def named(records: Sequence[Json], event: str) -> list[Json]:
    """All records of an event."""
    return [record for record in records if record["event"] == event]


def passed(a: Json, b: Json) -> Decimal:
    """Seconds from one line to the next: by the clock that went further, the monotonic one within a boot."""
    ticked = Decimal(str(b["mono"])) - Decimal(str(a["mono"])) if a["boot_id"] == b["boot_id"] else Decimal(0)
    return max(Decimal(0), ticked, Decimal(str(b["wall"])) - Decimal(str(a["wall"])))


def seconds_between(records: Sequence[Json], first: int, last: int) -> Decimal:
    """Seconds from line to line, over those between, rounded up to a millisecond."""
    stretch = [record for record in records if first <= record["seq"] <= last]
    steps = sum((passed(stretch[i - 1], stretch[i]) for i in range(1, len(stretch))), Decimal(0))
    ends = {record["seq"]: Decimal(str(record["wall"])) for record in records}
    most = max(steps, ends[last] - ends[first])
    return most.quantize(Decimal("0.001"), rounding=ROUND_CEILING)


def split_rentals(records: Sequence[Json]) -> list[list[Json]]:
    """The records of each machine that was asked for, by its intent."""
    rentals: list[list[Json]] = []
    for record in records:
        if record["event"] == "create.intended":
            rentals.append([])
        if rentals:
            rentals[-1].append(record)
    return rentals


def rental_facts(rental: Sequence[Json]) -> Json:
    """One line of the receipt's `cost.rentals`, with what it has cost so far where it has not ended."""
    intent, events = rental[0]["data"], {record["event"]: record for record in rental}
    told = [record["data"]["instance"] for record in rental if record["data"].get("instance")]
    rates = [one["rate_micros_per_hour"] for one in told if one["rate_micros_per_hour"] is not None]
    machines = 1 + sum(record["data"]["code"] == "create.duplicate" for record in named(rental, "incident"))
    refused, proven = "create.refused" in events, events.get("death.proven")
    end = "refused" if refused else proven["data"]["teardown"] if proven else "not_proven"
    until = proven["seq"] if proven else rental[-1]["seq"]
    seconds = 0.0 if refused else float(seconds_between(rental, rental[0]["seq"], until))
    rate = max(rates) if rates else intent["rate_micros_per_hour"]
    hourly, once = (Micros(intent.get(key, 0)) for key in ("beside_micros_per_hour", "egress_micros"))
    lasting = total(*(cost_of(Micros(one), seconds, intent["billing_unit_s"]) for one in (rate, hourly)))
    spent = times(total(lasting, once if seconds else Micros(0)), machines)
    return {
        "attempt": intent["attempt"],
        "token": intent["token"],
        "machines": machines,
        "billable_s": seconds,
        "billing_unit_s": intent["billing_unit_s"],
        "rate_micros_per_hour": rate,
        "rate_is": "provider-reported" if rates else "quoted",
        "micros": spent,
        "end": end,
    }


def measured_micros(records: Sequence[Json]) -> Micros:
    """What a run has cost at most by its journal; while a machine is not proven gone, what it has cost so far."""
    return total(*(rental_facts(rental)["micros"] for rental in split_rentals(records)))


def is_more(records: Sequence[Json]) -> bool:
    """Whether more was paid than the journal can tell: for a machine that came late, or something beside one."""
    told = [(record["data"]["code"], record["data"].get("billed") is True) for record in named(records, "incident")]
    return any(code == "create.late" or (code == "leftover" and billed) for code, billed in told)


def instance_of(rentals: Sequence[Sequence[Json]]) -> Json | None:
    """The last machine that was seen."""
    for rental in reversed(rentals):
        told = [record["data"]["instance"] for record in rental if record["data"].get("instance")]
        if not told:
            continue
        intent, seen, ready = rental[0]["data"], plain_data(told[-1]), named(rental, "ready.observed")
        hello = {"is": "instance-reported", "hello": plain_data(ready[-1]["data"]["facts"])} if ready else None
        named_by_offer = {key: seen.get(key) or intent["offer"][key] for key in ("region", "gpu", "gpu_count")}
        return {
            "is": "provider-reported",
            "provider": intent["provider"],
            "id": seen.get("id"),
            "token": intent["token"],
            "type": intent["offer"]["type_id"],
            "created_wall": seen.get("created_wall"),
            "facts": hello,
            **named_by_offer,
        }
    return None


def proof_of(rental: Sequence[Json], facts: Json) -> Json:
    """How a rental ended, and every read of it."""
    proven = named(rental, "death.proven")
    claim = plain_data(proven[-1]["data"]) if proven else {}
    readings = [
        {"at": utc(read["wall"]), **{key: value for key, value in read["data"].items() if key not in ("id", "at_s")}}
        for read in named(rental, "death.read")
    ]
    return {
        "token": facts["token"],
        "teardown": facts["end"],
        "id": claim.get("id"),
        "reads": claim.get("reads"),
        "spread_s": claim.get("spread_s"),
        "evidence_sha256": claim.get("evidence_sha256"),
        "readings": readings,
    }
