"""Computes each rental's seconds, money and end from the raw journal a second time, with code of the audit alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING, Decimal

from gpurun.core.money import Micros, cost_of, left_of, times, total
from gpurun.core.untrusted import plain_data
from gpurun.ledger.audit.strict_lines import Json

_ALIVE = {"create.observed", "ready.observed", "ship.observed", "train.started", "rate.observed"}
_ALIVE |= {"train.observed", "collect.observed"}
_WATCHED, _STAMPS = 120, Decimal(2)
_MICRO, _MILLI, _NONE = Decimal("0.000001"), Decimal("0.001"), Decimal(0)


def named(records: Sequence[Json], event: str) -> list[Json]:
    """All records of an event."""
    return [record for record in records if record["event"] == event]


def _told(seconds: float) -> Decimal:
    """A number of seconds as it is written, read to the microsecond."""
    return Decimal(str(seconds)).quantize(_MICRO)


def passed(a: Json, b: Json) -> Decimal:
    """Seconds from one line to the next: by the clock that went further, the monotonic one within a boot."""
    ticked = _told(b["mono"]) - _told(a["mono"]) if a["boot_id"] == b["boot_id"] else _NONE
    return max(_NONE, ticked, _told(b["wall"]) - _told(a["wall"]))


def seconds_between(records: Sequence[Json], first: int, last: int) -> Decimal:
    """Seconds from line to line, over those between, rounded up to a millisecond."""
    stretch = [record for record in records if first <= record["seq"] <= last]
    steps = sum((passed(stretch[i - 1], stretch[i]) for i in range(1, len(stretch))), _NONE)
    return steps.quantize(_MILLI, rounding=ROUND_CEILING)


def split_rentals(records: Sequence[Json]) -> list[list[Json]]:
    """The records of each machine that was asked for, by its intent."""
    rentals: list[list[Json]] = []
    for record in records:
        if record["event"] == "create.intended":
            rentals.append([])
        if rentals:
            rentals[-1].append(record)
    return rentals


def rental_facts(rental: Sequence[Json], records: Sequence[Json]) -> Json:
    """The figures of a line of the receipt's `cost.rentals`, with its cost so far where it has not ended."""
    intent, events = rental[0]["data"], {record["event"]: record for record in rental}
    told = [record["data"]["instance"] for record in rental if record["data"].get("instance")]
    rates = [one["rate_micros_per_hour"] for one in told if one["rate_micros_per_hour"] is not None]
    doubles = [one["data"] for one in named(rental, "incident") if one["data"]["code"] == "create.duplicate"]
    refused, proven = "create.refused" in events, events.get("death.proven")
    extras = _extras(rental, records)
    end = "refused" if refused else proven["data"]["teardown"] if proven else "not_proven"
    seconds, end_is = (0.0, None) if refused else _billable(rental)
    rate = max(rates) if rates else intent["rate_micros_per_hour"]
    hourly, planned = (Micros(intent.get(key, 0)) for key in ("beside_micros_per_hour", "egress_micros"))
    once = Micros(events.get("collect.observed", rental[0])["data"].get("egress_micros", planned))

    def lasting(so_long: float) -> Micros:
        paid_s = max(so_long, intent.get("least_billed_s", 0)) if so_long else 0.0
        return total(*(cost_of(Micros(one), paid_s, intent["billing_unit_s"]) for one in (rate, hourly)))

    rises, dearer = [], Micros(0)
    for to, more, since, _ in rises_of(rental, rate):
        so_long = float(max(_NONE, Decimal(str(seconds)) - since))
        rises.append({"rate_micros_per_hour": to, "billable_s": so_long})
        dearer = total(dearer, cost_of(more, so_long, intent["billing_unit_s"]))
    machines = 1 + sum(not one.get("id") for one in doubles)
    beside = [{**one, "micros": lasting(one["billable_s"])} for one in extras]
    own = times(total(lasting(seconds), dearer, once if seconds else Micros(0)), machines)
    told_only = {"end_is": end_is if proven else None, "extras": beside, "price_rose": rises}
    return {
        "machines": machines,
        "billable_s": seconds,
        "rate_micros_per_hour": rate,
        "micros": total(own, *(one["micros"] for one in beside)),
        "end": end,
        **{key: value for key, value in told_only.items() if value},
    }


def paid_until(rental: Sequence[Json]) -> int:
    """The line until which a machine was paid at most: the first of the reads behind its proof, else the last line."""
    proofs = named(rental, "death.proven")
    if not proofs:
        return int(rental[-1]["seq"])
    reads = [one for one in named(rental, "death.read") if one["seq"] < proofs[-1]["seq"]]
    counted = reads[max(0, len(reads) - max(1, proofs[-1]["data"]["reads"])) :]
    first = counted[0] if counted else proofs[-1]
    return int((first if "found_gone" in first["data"] else proofs[-1])["seq"])


def _billable(rental: Sequence[Json]) -> tuple[float, str | None]:
    """The seconds that may be billed, and what their end rests on: the least of the bounds that hold."""
    start, last = rental[0]["seq"], paid_until(rental)
    longest = seconds_between(rental, start, last)
    gone = next(one for one in rental if one["seq"] == last)
    read, intent = gone["data"], rental[0]["data"]
    if gone["event"] != "death.read":
        is_queued, starts = _queue_limit(intent["lease"]) is not None, starts_of(rental)
        since = min(starts, default=longest) if is_queued else _NONE
        return float(max(_NONE, longest - since)), None
    lives = [_NONE, *lives_of(rental)]
    lives += [longest - _milli(_told(read["alive_s_ago"]))] if read.get("alive_s_ago") is not None else []
    alive = max(lives)
    bounds: list[tuple[Decimal, str]] = [(longest, "measured" if longest - alive <= _WATCHED else "unseen")]
    told = [record["data"]["instance"].get("created_wall") for record in rental if record["data"].get("instance")]
    if (limit := _queue_limit(intent["lease"])) is not None:
        return _after_queue(rental, read, bounds, alive, limit)
    births = [_told(one) for one in told if one is not None]
    if births and read.get("ended_wall") is not None:
        lasted = _milli(_told(read["ended_wall"]) - min(births) + _STAMPS)
        born = lives_of(rental)[:1]
        if lasted >= alive - (born[0] if born else 0):
            bounds.append((lasted, "provider-reported"))
    timed = named(rental, "destroy.intended")
    if len(timed) == 1 and timed[0]["data"].get("timer") and read.get("found_gone"):
        until = _told(intent["deadline_wall"]) + _told(intent["lease"]["kill_allowance_s"])
        by_timer = _milli(until - _told(rental[0]["wall"]))
        if by_timer >= alive:
            bounds.append((by_timer, "its own timer"))
    least = min(bounds, key=lambda bound: bound[0])
    return float(least[0]), least[1]


def _queue_limit(lease: Json) -> Decimal | None:
    """How long at most something runs once its queue is over; None where there is no queue."""
    parts = [_told(lease[part]) for part in lease if part not in ("queue_s", "hours_s")]
    return _milli(sum(parts, _NONE)) if lease.get("queue_s") else None


def starts_of(rental: Sequence[Json]) -> list[Decimal]:
    """After how many seconds of a rental its machine began, by every record that has its provider's word of that."""
    starts = []
    for record in rental:
        began = (record["data"].get("instance") or {}).get("started_wall")
        if began is not None and record["seq"] <= paid_until(rental):
            ago = _milli(max(_NONE, _told(record["wall"]) - _told(began)) + _STAMPS)
            starts.append(max(_NONE, seconds_between(rental, rental[0]["seq"], record["seq"]) - ago))
    return starts


def _after_queue(
    rental: Sequence[Json], read: Json, bounds: list[tuple[Decimal, str]], alive: Decimal, limit: Decimal
) -> tuple[float, str]:
    """The same of what had to queue: from its earliest start; of one whose start nobody told, what bounds it."""
    starts = starts_of(rental)
    start = min(starts, default=_NONE)
    seen = alive if starts else _NONE
    if read.get("ran_s") is not None:
        ran = _told(read["ran_s"])
        bounds.append((start + _milli(ran + _STAMPS if ran else ran), "provider-reported"))
    is_limited = seen <= 0 or (len(named(rental, "destroy.intended")) == 1 and read.get("found_gone"))
    if is_limited:
        bounds.append((start + limit, "its own timer"))
    held = [bounds[0], *(one for one in bounds[1:] if one[0] >= seen)]
    least = min(held, key=lambda bound: bound[0])
    return float(max(_NONE, least[0] - start)), least[1]


def lives_of(rental: Sequence[Json]) -> list[Decimal]:
    """After how many seconds of a rental each sign of life came, before the line until which it was paid."""
    start, last = rental[0]["seq"], paid_until(rental)
    return [seconds_between(rental, start, one["seq"]) for one in rental if one["seq"] < last and _lives(one)]


def _lives(record: Json) -> bool:
    data = record["data"]
    if record["event"] == "incident":
        return bool(data["code"] == "price.rose")
    return record["event"] in _ALIVE and data.get("outcome") != "lost" and not data.get("remembered")


def _milli(seconds: Decimal) -> Decimal:
    return seconds.quantize(_MILLI)


def rises_of(rental: Sequence[Json], rate: int) -> Iterator[tuple[int, Micros, Decimal, Decimal]]:
    """Each price that rose: the new one, how much more it is, from which second of the rental, and when it was told."""
    for one in named(rental, "incident"):
        data = one["data"]
        if data["code"] != "price.rose" or data["rate_micros_per_hour"] <= rate:
            continue
        late = max(_NONE, _milli(_told(one["wall"]) - _told(data["since_wall"])))
        at = seconds_between(rental, rental[0]["seq"], one["seq"])
        more = left_of(Micros(data["rate_micros_per_hour"]), Micros(rate))
        yield data["rate_micros_per_hour"], more, max(Decimal(0), at - late), at
        rate = data["rate_micros_per_hour"]


def _extras(rental: Sequence[Json], records: Sequence[Json]) -> list[Json]:
    """The machines beside it that have its token, from its intent to their proven end, or so far."""
    token, found, last = rental[0]["data"]["token"], dict[str, Json](), int(records[-1]["seq"])
    kinds = {"create.duplicate"} | ({"create.late"} if "home" in records[0]["data"] else set())
    ends: dict[str, int] = {}
    limit = _queue_limit(rental[0]["data"]["lease"]) or Decimal("Infinity")
    for record in records:
        data = record["data"]
        if record["event"] == "incident" and data.get("token") == token and data.get("id"):
            if data["code"] in kinds:
                found[data["id"]] = {"id": plain_data(data["id"])}
                ends.pop(data["id"], None)
            elif data["code"] in ("create.late_gone", "create.duplicate_gone"):
                ends.setdefault(data["id"], record["seq"])
        elif record["event"] == "death.proven" and any(record is one for one in rental):
            ends = {**dict.fromkeys(found, int(record["seq"])), **ends}
    return [
        told
        | {"billable_s": float(min(limit, seconds_between(records, rental[0]["seq"], ends.get(name, last))))}
        | {"ended": name in ends}
        for name, told in found.items()
    ]


def is_imported(records: Sequence[Json]) -> bool:
    """Whether the run is a notebook's, of which nothing was seen here."""
    return bool(records) and bool(records[0]["data"].get("imported"))


def measured_micros(records: Sequence[Json]) -> Micros | None:
    """What a run has cost at most by its journal; while a machine is not proven gone, what it has cost so far.

    None where it ran in a notebook: nobody here saw what that cost.
    """
    if is_imported(records):
        return None
    return total(*(rental_facts(rental, records)["micros"] for rental in split_rentals(records)))


def is_more(records: Sequence[Json]) -> bool:
    """Whether more was paid than the journal can tell: for a machine that came late, or something beside one."""
    is_new = bool(records) and "home" in records[0]["data"]
    tokens = {intent["data"]["token"] for intent in named(records, "create.intended")}
    for data in (record["data"] for record in named(records, "incident")):
        is_told = is_new and data.get("id") and data.get("token") in tokens
        if (data["code"] == "create.late" and not is_told) or (
            data["code"] == "leftover" and data.get("billed") is True
        ):
            return True
    return False


def money_and_death(records: Sequence[Json]) -> Json:
    """What the receipt must say of seconds, money and ends, and of nothing else."""
    facts = [rental_facts(rental, records) for rental in split_rentals(records)]
    is_live, cap = is_more(records) or any(is_open(one) for one in facts), records[0]["data"]["cap_micros"]
    if is_imported(records):
        cost = {"upper_bound_micros": None, "is": "unknown", "cap_micros": cap, "cap_kept": None, "rentals": []}
        return {"runtime": {"billable_s": None}, "cost": cost, "teardown": {"is": "user_operated", "evidence": []}}
    spent = None if is_live else total(*(one["micros"] for one in facts))
    kept = None if cap is None or spent is None else left_of(cap, spent) >= 0
    unseen = ("unseen", "its own timer")
    is_unseen = any(one.get("extras") or (one["rate_micros_per_hour"] and one.get("end_is") in unseen) for one in facts)
    figure = "bound" if is_unseen and records[0]["data"].get("rules", 1) > 1 else "measured"
    billable = sum((Decimal(str(one["billable_s"])) for one in facts), Decimal(0))
    ends = [one["end"] for one in facts if one["end"] != "refused"]
    hidden = {"billable_s": None, "micros": None}
    return {
        "runtime": {"billable_s": None if is_live else float(billable)},
        "cost": {
            "upper_bound_micros": spent,
            "is": "unknown" if is_live else figure,
            "cap_micros": cap,
            "cap_kept": (kept or None) if is_unseen else kept,
            "rentals": [{**one, **hidden} if is_open(one) else one for one in facts],
        },
        "teardown": {"is": "not_proven" if "not_proven" in ends else (ends or [None])[-1]},
    }


def is_open(fact: Json) -> bool:
    """Whether a rental of these figures may cost more yet."""
    return fact["end"] == "not_proven" or not all(extra["ended"] for extra in fact.get("extras", ()))
