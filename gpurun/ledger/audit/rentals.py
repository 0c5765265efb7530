"""Computes each rental's seconds, money and end from the raw journal a second time, with code of the audit alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING, Decimal

from gpurun.core.money import Micros, cost_of, left_of, times, total
from gpurun.core.untrusted import plain_data
from gpurun.ledger.audit.strict_lines import Json

_ALIVE = {"create.observed", "ready.observed", "ship.observed", "train.started", "rate.observed"}
_ALIVE |= {"train.observed", "collect.observed"}
_SAID_ALIVE = {"price.rose", "death.denied", "machine.back"}
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
    rate = max(rates) if rates else intent["rate_micros_per_hour"]
    hourly, bill = Micros(intent.get("beside_micros_per_hour", 0)), billed_micros(intent["token"], records)
    lasted = None if bill is None or not rate + hourly else _paid_for(bill, rate + hourly)
    seconds, end_is = (0.0, None) if refused else _billable(rental, lasted)
    once = _egress(intent, events)

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


def billed_micros(token: str, records: Sequence[Json]) -> int | None:
    """What the provider's bill of a token's machine came to; None where it was not read."""
    told = [one["data"]["micros"] for one in named(records, "bill.observed") if one["data"]["token"] == token]
    return told[-1] if told else None


def _paid_for(micros: int, hourly: int) -> Decimal:
    """The seconds that a bill is for at this price, in whole ones."""
    return (Decimal(micros) * 3600 / hourly).to_integral_value(rounding=ROUND_CEILING)


def _egress(intent: Json, events: Json) -> Micros:
    """What is charged for all that left a machine: nothing if it never answered."""
    planned = intent.get("egress_micros", 0)
    if "collect.observed" in events:
        sent = events["collect.observed"]["data"].get("egress_micros", planned)
        return Micros(max(sent, planned if intent.get("sends_itself") else 0))
    return Micros(planned if "ready.observed" in events else 0)


def paid_until(rental: Sequence[Json]) -> int:
    """The line until which a machine was paid at most: the first of the reads behind its proof, else the last line."""
    proofs = named(rental, "death.proven")
    if not proofs:
        return int(rental[-1]["seq"])
    reads = [one for one in named(rental, "death.read") if one["seq"] < proofs[-1]["seq"]]
    counted = reads[max(0, len(reads) - max(1, proofs[-1]["data"]["reads"])) :]
    first = counted[0] if counted else proofs[-1]
    return int((first if "alive_s_ago" in first["data"] else proofs[-1])["seq"])


def _billable(rental: Sequence[Json], bill: Decimal | None) -> tuple[float, str | None]:
    """The seconds that may be billed, and what their end rests on: the least of the bounds that hold.

    `bill` is for how many seconds the provider's own bill is, where that was read.
    """
    start, last = rental[0]["seq"], paid_until(rental)
    longest = seconds_between(rental, start, last)
    gone = next(one for one in rental if one["seq"] == last)
    read, intent = gone["data"], rental[0]["data"]
    if gone["event"] != "death.read":
        is_queued, starts = _queue_limit(intent["lease"]) is not None, starts_of(rental)
        since = min(starts, default=longest) if is_queued else _NONE
        return float(max(_NONE, longest - since)), None
    seen = [_NONE, *lives_of(rental)]
    born = seen[1] if len(seen) > 1 else _NONE
    agos = (read.get("alive_s_ago"), read.get("up_s_ago", read.get("alive_s_ago")))
    alive, up = (max(seen) if ago is None else max(*seen, longest - _milli(_told(ago))) for ago in agos)
    since = _gone_since(rental, last)
    absent = since if since >= alive else longest
    bounds: list[tuple[Decimal, str]] = [(absent, "measured" if absent - alive <= _WATCHED else "unseen")]
    told = [record["data"]["instance"].get("created_wall") for record in rental if record["data"].get("instance")]
    if (limit := _queue_limit(intent["lease"])) is not None:
        return _after_queue(rental, read, bounds, (alive, up), limit)
    births = [_told(one) for one in told if one is not None]
    if births and read.get("ended_wall") is not None:
        lasted = _milli(_told(read["ended_wall"]) - min(births) + _STAMPS)
        bounds += [(lasted, "provider-reported")] if lasted >= up - born else []
    if bill is not None and bill >= alive - born:
        bounds.append((bill, "the provider's bill"))
    timed = named(rental, "destroy.intended")
    if len(timed) == 1 and timed[0]["data"].get("timer"):
        until = _told(intent["deadline_wall"]) + _told(intent["lease"]["kill_allowance_s"])
        by_timer = _milli(until - _told(rental[0]["wall"]))
        bounds += [(by_timer, "its own timer")] if by_timer >= alive else []
    least = min(bounds, key=lambda bound: bound[0])
    return float(max(_MILLI, least[0])), least[1]


def _gone_since(rental: Sequence[Json], last: int) -> Decimal:
    """After how many seconds the readings begin that show it gone and were not broken off before that line."""
    since = until = None
    for record in rental:
        if record["seq"] > last:
            break
        if _lives(record, rental):
            since = None
        elif record["event"] == "death.read" or _is_row(record):
            at = seconds_between(rental, rental[0]["seq"], record["seq"])
            begun = at - _milli(_told(record["data"].get("gone_s_ago") or 0))
            is_on = since is not None and until is not None and begun - until <= _WATCHED
            since, until = (min(since, begun) if is_on and since is not None else begun), at
    return since if since is not None else _NONE


def _is_row(record: Json) -> bool:
    return bool(record["event"] == "incident" and record["data"]["code"] == "machine.gone")


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
    rental: Sequence[Json],
    read: Json,
    bounds: list[tuple[Decimal, str]],
    last_seen: tuple[Decimal, ...],
    limit: Decimal,
) -> tuple[float, str]:
    """The same of what had to queue: from its earliest start; of one whose start nobody told, what bounds it."""
    starts = starts_of(rental)
    start = min(starts, default=_NONE)
    alive, up = last_seen if starts else (_NONE, _NONE)
    if read.get("ran_s") is not None:
        ran = _told(read["ran_s"])
        ended = start + _milli(ran + _STAMPS if ran else ran)
        bounds += [(ended, "provider-reported")] if ended >= up else []
    is_limited = alive <= 0 or len(named(rental, "destroy.intended")) == 1
    if is_limited and start + limit >= alive:
        bounds.append((start + limit, "its own timer"))
    least = min(bounds, key=lambda bound: bound[0])
    return float(max(_NONE, least[0] - start)), least[1]


def lives_of(rental: Sequence[Json]) -> list[Decimal]:
    """After how many seconds of a rental each sign of life came, before the line until which it was paid."""
    start, last = rental[0]["seq"], paid_until(rental)
    return [seconds_between(rental, start, one["seq"]) for one in rental if one["seq"] < last and _lives(one, rental)]


def _lives(record: Json, rental: Sequence[Json]) -> bool:
    """Whether a line is a sign of life; of what queued only its scheduler's word is, as its folder outlives it."""
    data = record["data"]
    if record["event"] == "incident":
        return bool(data["code"] in _SAID_ALIVE)
    if rental[0]["data"]["lease"].get("queue_s"):
        return record["event"] in _ALIVE and "instance" in data
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
    by_bill = any(one["rate_micros_per_hour"] and one.get("end_is") == "the provider's bill" for one in facts)
    figure = "bound" if is_unseen else "billed" if by_bill else "measured"
    figure = figure if records[0]["data"].get("rules", 1) > 1 else "measured"
    bills = [billed_micros(rental[0]["data"]["token"], records) for rental in split_rentals(records)]
    paid = [(bill, one) for bill, one in zip(bills, facts, strict=True) if one["end"] != "refused"]
    owed = [(bill, one) for bill, one in paid if one["rate_micros_per_hour"] or one.get("extras")]
    has_bill = bool(owed) and not is_live and all(bill is not None and not one.get("extras") for bill, one in owed)
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
            "billed_micros": sum(bill or 0 for bill, _ in owed) if has_bill else None,
            "billed_is": "provider-reported" if has_bill else "unknown",
            "rentals": [{**one, **hidden} if is_open(one) else one for one in facts],
        },
        "teardown": {"is": "not_proven" if "not_proven" in ends else (ends or [None])[-1]},
    }


def is_open(fact: Json) -> bool:
    """Whether a rental of these figures may cost more yet."""
    return fact["end"] == "not_proven" or not all(extra["ended"] for extra in fact.get("extras", ()))
