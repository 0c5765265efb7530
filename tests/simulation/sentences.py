"""Judge what gpurun told the user about money and about living machines, by what was true at that moment."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpurun.core.journal_records import Event, Record
from gpurun.core.money import Figure, format_usd, parse_usd
from tests.emulators.fake import Box, Fault
from tests.simulation.play import Outcome, Played

_CENT = 10_000
_FIGURE = re.compile(r"\$(?:\d[\d,]*)(?:\.\d+)?")
_NOTHING_MADE = frozenset(
    {"account.no_funds", "account.no_quota", "account.unknown", "create.cannot_look", "create.no_capacity"}
    | {"create.rejected", "price.rose", "price.unknown"}
)
"""Failures of a create whose hint states that nothing was created."""
_UNTRUE_CLOCKS = ("jump", "doze", "kill and reboot")


def sentences_hold(played: Played) -> Iterator[str]:
    """Yield every false statement: of `ps` at each end of a supervisor, and of the journal."""
    boxes = [box for cloud in played.clouds.values() for box in cloud.boxes]
    for outcome in played.outcomes:
        yield from _of_list(outcome, played)
    for at_s, record in played.timed:
        if record.event is Event.INCIDENT:
            yield from (f"at {at_s:.0f} s: {sentence}" for sentence in _of_incident(at_s, record, boxes, played))
        if record.event is Event.DEATH_READ and (ago_s := record.data["alive_s_ago"]) is not None:
            shown, then_s = [box for box in boxes if box.id == record.data["id"]], at_s - ago_s
            lag_s = max(cloud.profile.list_lag_s for cloud in played.clouds.values())
            is_true = all(_lives(box, then_s) or _lives(box, then_s - lag_s) for box in shown)
            # A deed may take time between the reading and its record, and a provider may answer from an old view.
            if not is_true and not played.scenario.deeds and not played.scenario.has(Fault.STALE):
                yield f"at {at_s:.0f} s it was told that {record.data['id']} lived {ago_s:.0f} s before"
        if (
            record.event is Event.STEP_FAILED
            and record.data["step"] == "create"
            and record.data["code"] in _NOTHING_MADE
        ):
            made = [box.id for box in boxes if _lives(box, at_s)]
            yield from (f"at {at_s:.0f} s {record.data['code']} is on record, and {name} lived" for name in made)


def _of_list(outcome: Outcome, played: Played) -> Iterator[str]:
    """Yield where `ps` showed too little: a living machine not as possibly billed, or less money than the meter has."""
    row, at = outcome.row, f"at {outcome.at_s:.0f} s ps said"
    if outcome.alive and not row.may_be_billing:
        yield f"{at} {row.state!r}, and {outcome.alive} lived"
    if row.spent_micros is None or played.scenario.has(*_UNTRUE_CLOCKS):
        return
    sentence = f"{at} {row.spent_is} {format_usd(row.spent_micros)}, and the meter {outcome.metered} micros"
    is_more = outcome.metered > row.spent_micros + _CENT and row.spent_is is not Figure.FLOOR
    if is_more and not _is_excused(played) and not ended_unseen(played):
        yield sentence


def _of_incident(at_s: float, record: Record, boxes: list[Box], played: Played) -> Iterator[str]:
    code, message = str(record.data["code"]), str(record.data["message"])
    named = [box for box in boxes if box.id == record.data.get("id")]
    if code.endswith("_gone") and any(_lives(box, at_s) for box in named):
        yield f"{message!r}, and it lived"
    if code == "boot.gone" and any(_lives(box, at_s) for box in named):
        yield f"{message!r}, and it lived"
    if code == "create.late" and not any(_lives(box, at_s - 60.0) or _lives(box, at_s) for box in named):
        yield f"{message!r}, and it did not live"
    if code == "death.denied" and not any(_lives(box, at_s - 5.0) for box in boxes):
        yield f"{message!r}, and nothing lived"
    most = _FIGURE.search(message)
    if code == "machine.ends_itself" and not most:
        yield f"{message!r} names no bound"
    if code == "machine.ends_itself" and most and not _is_excused(played):
        ends_s = at_s + record.data["ends_wall"] - record.wall
        is_kept = all(box.died_s is not None and box.died_s <= ends_s + 60.0 for box in boxes)
        metered = sum(cloud.metered() for cloud in played.clouds.values())
        if is_kept and metered > parse_usd(most[0].replace(",", "")) + _CENT:
            yield f"{message!r}, and it was {metered} micros"


def _is_excused(played: Played) -> bool:
    """Return whether a machine existed that gpurun could not know of, or that was dearer than reported."""
    return played.scenario.has("made twice", "made, but dearer")


def ended_unseen(played: Played) -> bool:
    """Return whether a machine ended where this laptop could not see it.

    Its provider denied it until it had ended; or it was never seen here and was ended from elsewhere; or it was a twin
    that was ended from elsewhere or by its own timer.
    """
    boxes = [box for cloud in played.clouds.values() for box in cloud.boxes]
    denials = played.scenario.times_of("denied")
    if any(start_s <= (box.died_s or 0.0) < end_s for box in boxes for start_s, end_s in denials):
        return True
    absent = any(
        record.event is Event.CREATE_REFUSED and record.data["reason"] == "absent" for record in played.records
    )
    swept = played.scenario.has("reap all", "reap elsewhere", "taken") or played.scenario.ending == "reaped elsewhere"
    timed_out = any(box.ends_s is not None and (box.died_s or 0.0) > box.ends_s for box in boxes)
    return (swept and absent) or ((swept or timed_out) and played.scenario.has(Fault.TWICE))


def _lives(box: Box, at_s: float) -> bool:
    return box.born_s <= at_s and (box.died_s is None or box.died_s > at_s)
