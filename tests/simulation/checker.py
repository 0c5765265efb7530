"""Judge a played scenario by the clouds' meters, the history and the run's folder, whatever gpurun itself believes.

Each promise that can be observed from outside is a function here, which yields a sentence for each breach.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from gpurun.core.journal_records import Event, Record
from gpurun.core.money import Micros, cost_of, total
from gpurun.core.trainer_events import StepEvent, events_of
from gpurun.ledger.audit import audit
from tests.emulators.fake import Box, FakeCloud, Fault
from tests.simulation.plans import LEASE, STEPS
from tests.simulation.play import Played, checkpoint_of, loss_at
from tests.simulation.scenario import Scenario
from tests.simulation.sentences import ended_unseen, sentences_hold

MAY_BE_BILLING = 9
_LOOKS_S = 2 * 5.0 + 2.0
# A duplicate that has been visible for so long must be gone before the upload to the first machine begins.
_SEEN_S = 30.0
_HOLD_SLACK_S, _LEASE_SLACK_S = 40.0, 5.0


def check(played: Played) -> list[str]:
    """Return every breach of a promise."""
    judges = (
        intent_first, find_second_machines, nothing_forgotten, death_is_proven, bounded_money, timers_hold,
        side_resources_go, it_ends, success_is_true, what_is_not_home_is_held, legs_follow, books_hold, sentences_hold,
    )  # fmt: skip
    return [f"{judge.__name__}: {breach}" for judge in judges for breach in judge(played)]


def intent_first(played: Played) -> Iterator[str]:
    """P1: no create request is sent before its intent is on disk, and every machine carries an intent's token."""
    intents = sends = 0
    for at_s, place in played.points:
        intents += place == "after create.intended"
        sends += place == "before create"
        if sends > intents:
            yield f"a create was sent at {at_s:.0f} s before its intent was on disk"
            return
    intended = {record.data["token"] for record in _named(played, Event.CREATE_INTENDED)}
    yield from (
        f"{box.id} carries {box.order.token}, which no journal has"
        for _, box in _boxes(played)
        if box.order.token not in intended
    )


def find_second_machines(played: Played) -> Iterator[str]:
    """P2: when an upload begins, no second machine lives that has been visible for a while."""
    for at_s, record in _timed(played):
        if record.event is not Event.SHIP_INTENDED:
            continue
        for cloud, box in _boxes(played):
            lag_s = cloud.profile.hidden_s + cloud.profile.list_lag_s + _SEEN_S
            first = record.data.get("id") or _instance_at(played, record.seq)
            if box.id != first and _lives(box, at_s) and at_s - box.born_s > lag_s:
                yield f"{box.id} lived beside {first} when shipping began at {at_s:.0f} s"


def nothing_forgotten(played: Played) -> Iterator[str]:
    """P3: if a machine lives when a supervisor ends, the journal states that it may be billed.

    The exit code is 9 if a machine lives or if the journal states this. A killed supervisor has no exit code.
    """
    for outcome in played.outcomes:
        if outcome.alive and not outcome.state.may_be_billing:
            yield f"at {outcome.at_s:.0f} s {outcome.alive} lived and the journal says {outcome.state.phase}"
        if outcome.alive and outcome.exit_code not in (MAY_BE_BILLING, None):
            yield f"at {outcome.at_s:.0f} s {outcome.alive} lived and the exit code was {outcome.exit_code}"
        if outcome.state.may_be_billing and outcome.exit_code not in (MAY_BE_BILLING, None):
            yield f"at {outcome.at_s:.0f} s the journal was red and the exit code was {outcome.exit_code}"


def death_is_proven(played: Played) -> Iterator[str]:
    """P4: a machine does not live at or after the record that proves its death or that its create was refused."""
    tokens = [record.data["token"] for record in _named(played, Event.CREATE_INTENDED)]
    current = -1
    for at_s, record in _timed(played):
        current += record.event is Event.CREATE_INTENDED
        if record.event not in (Event.DEATH_PROVEN, Event.CREATE_REFUSED):
            continue
        for _, box in _boxes(played):
            if box.order.token == tokens[current] and (box.died_s is None or box.died_s > at_s):
                until = "for ever" if box.died_s is None else f"until {box.died_s:.0f} s"
                yield f"{record.event} at {at_s:.0f} s, and {box.id} (born {box.born_s:.0f} s) lived {until}"


def bounded_money(played: Played) -> Iterator[str]:
    """P5: the clouds' meters stay within the receipt's bound, and within the cap unless the excess is excused.

    What the receipt states about the cap must be true.
    """
    metered = total(*(cloud.metered() for cloud in played.clouds.values()))
    cap = played.plan.cap_micros or 0
    if played.closed:
        bound = _receipt(played)["cost"]["upper_bound_micros"]
        if metered > bound and not ended_unseen(played):
            yield f"the receipt says at most {bound} micros, the meter {metered}"
        if metered > cap and _receipt(played)["cost"]["cap_kept"] and not ended_unseen(played):
            yield f"the receipt says that the cap of {cap} micros was kept, the meter {metered}"
        if metered <= cap and _receipt(played)["cost"]["cap_kept"] is False:
            yield f"the receipt says that the cap of {cap} micros was broken, the meter {metered}"
        yield from _close_bound(played, bound, metered)
    if metered > cap and not is_cap_excused(played):
        yield f"the cap is {cap} micros, the meter says {metered}"


def is_calm(scenario: Scenario) -> bool:
    """Return whether nothing goes wrong but that machines are taken away, which gpurun notices soon."""
    return not (scenario.strikes or scenario.weather or any(deed.what != "taken" for deed in scenario.deeds))


def _close_bound(played: Played, bound: int, metered: int) -> Iterator[str]:
    """P5, the other side: the bound in a receipt whose machines were all watched is not much higher than the meter.

    It is at most 3 % higher, or higher by the egress and, for each machine, a billing unit and two looks. Only
    scenarios without trouble are judged.
    """
    cost, scenario = _receipt(played)["cost"], played.scenario
    if not is_calm(scenario) or not all(rental.get("end_is") == "measured" for rental in cost["rentals"]):
        return
    intents = _named(played, Event.CREATE_INTENDED)
    most = sum(intent.data["egress_micros"] for intent in intents)
    for rental, intent in zip(cost["rentals"], intents, strict=True):
        cloud = played.clouds[intent.data["provider"]]
        slack_s = (
            _LOOKS_S + 2 * scenario.list_s + cloud.profile.list_lag_s + cloud.profile.dying_s + rental["billing_unit_s"]
        )
        most += cost_of(Micros(rental["rate_micros_per_hour"]), slack_s, rental["billing_unit_s"])
    if bound > max(metered * 103 // 100, metered + most):
        yield f"the receipt says at most {bound} micros of a watched machine, the meter {metered}"


def timers_hold(played: Played) -> Iterator[str]:
    """P6: a machine with a timer ends by it, and after the sweeps no machine lives.

    A timer may be late if the provider is silent, refuses ends or denies machines.
    """
    for cloud, box in _boxes(played):
        if box.died_s is None:
            yield f"{box.id} (born {box.born_s:.0f} s) lives for ever, whatever was swept: {played.after_reap}"
        elif (
            box.ends_s is not None
            and box.died_s > box.ends_s + cloud.profile.dying_s
            and not played.scenario.has("silent", "ends refused", "denied")
        ):
            yield f"{box.id} outlived its own timer of {box.ends_s:.0f} s until {box.died_s:.0f} s"


def side_resources_go(played: Played) -> Iterator[str]:
    """When a run is closed, each side resource is removed, or an incident reports it."""
    incidents = json.dumps([record.data for record in _named(played, Event.INCIDENT)])
    for cloud in played.clouds.values():
        for thing in cloud.things:
            is_on_record = thing.leftover.id in incidents or "leftover" in incidents
            if played.closed and thing.removed_s is None and not is_on_record:
                yield f"{thing.leftover.id} was left behind without a word"


def it_ends(played: Played) -> Iterator[str]:
    """P9: a run that is resumed often enough is closed; no supervisor ends with a bug or works for ever.

    If only deeds disturbed the run, no more machines were requested than these deeds explain.
    """
    last = played.outcomes[-1]
    if played.scenario.ending == "resumed" and not played.closed:
        yield f"it never closes: {[outcome.words for outcome in played.outcomes]}"
    for outcome in played.outcomes:
        if outcome.words.startswith("endless") or (
            outcome.words in ("BUG", "bug") and not played.scenario.has(Fault.BROKEN)
        ):
            yield f"{outcome.words} at {outcome.at_s:.0f} s: {last.state.failure}"
    kills_only = not played.scenario.strikes and not played.scenario.weather
    # After a kill the create may be repeated; after a machine's end from elsewhere the next offer may be taken.
    most = 1 + played.scenario.has("kill", "kill and reboot", "taken", "reap all", "reap elsewhere")
    if kills_only and not played.scenario.legs and sum(place == "before create" for _, place in played.points) > most:
        yield "nothing but kills went wrong, and more was created than asked for"


def success_is_true(played: Played) -> Iterator[str]:
    """P9, P10: exit 0 means that training ended as requested and that every file is at home."""
    if played.closed and played.outcomes[-1].exit_code == 0 and not played.scenario.legs:
        home = {path.name for path in played.folder.artifacts.rglob("*.safetensors")}
        as_wished = "stopped" if played.scenario.has("stop", "stop now") else "done"
        counts = (
            (3, 4) if played.scenario.has("collect") else (3,)
        )  # A collect of all files also downloads an older checkpoint.
        if played.outcomes[-1].state.outcome not in ("done", as_wished) or len(home) not in counts:
            yield f"exit 0 with {played.outcomes[-1].state.outcome!r} and {len(home)} files"


def what_is_not_home_is_held(played: Played) -> Iterator[str]:
    """P11: a machine whose files are not all at home is asked to end only after one hold, no longer than announced.

    No hold is due if the user requested the destroy, the lease is almost over, the machine is gone or the cap could not
    be kept.
    """
    lacking, held = False, False
    for at_s, record in _timed(played):
        match record.event:
            case Event.CREATE_INTENDED:
                lacking, held, until_s = False, False, 0.0
                lease_over_s = at_s + LEASE.total_s - LEASE.destroy_s - _LEASE_SLACK_S
            case Event.COLLECT_OBSERVED:
                lacking = bool(record.data["missing"]) and not record.data.get("remembered")
            case Event.STOP_REQUESTED if record.data["how"] == "destroy":
                lacking = False
            case Event.HOLD_INTENDED:
                if held:
                    yield f"it was held again at {at_s:.0f} s"
                held, until_s = True, at_s + record.data["until_wall"] - record.wall
            case Event.HOLD_OBSERVED if at_s > until_s + _HOLD_SLACK_S and not _proof_was_late(played):
                yield f"it was held until {at_s:.0f} s, and {until_s:.0f} s was told"
            case Event.DESTROY_ASKED if lacking and not held and at_s < lease_over_s and not is_cap_excused(played):
                if any(box.id == record.data["id"] and _lives(box, at_s) for _, box in _boxes(played)):
                    yield f"a machine was asked to end at {at_s:.0f} s over what was not at home"


def legs_follow(played: Played) -> Iterator[str]:
    """A run moves to another machine only if its plan allows it, no stop was requested and no known machine lives.

    Its machines together stay within the cap, and a run that is done has the result of an unbroken one.
    """
    records, cap = played.records, played.plan.cap_micros or 0
    plans = [(at_s, record) for at_s, record in _timed(played) if record.event is Event.LEG_PLANNED]
    if plans and not played.scenario.legs:
        yield "it moved, and nobody had agreed to that"
    known = {record.data["token"] for record in _named(played, Event.CREATE_OBSERVED)}
    for at_s, record in plans:
        alive = [box.id for _, box in _boxes(played) if _lives(box, at_s) and box.order.token in known]
        if alive and not played.scenario.has(Fault.TWICE):
            yield f"{alive} lived when the next machine was planned at {at_s:.0f} s"
        before = [earlier for earlier in records if earlier.seq < record.seq]
        if any(earlier.event is Event.STOP_REQUESTED for earlier in before):
            yield f"it moved at {at_s:.0f} s after a stop"
        if record.data["spent_micros"] + record.data["left_micros"] != cap:
            yield "what was spent and what is left are not the cap"
    if sum(bool(record.data.get("token")) for _, record in plans) >= max(1, played.scenario.legs):
        yield "it was on more machines than were agreed to"
    for _, intent in ((at_s, record) for at_s, record in _timed(played) if record.event is Event.CREATE_INTENDED):
        planned = [plan for _, plan in plans if plan.seq < intent.seq]
        if planned and intent.data["worst_micros"] > planned[-1].data["left_micros"]:
            yield f"a machine may cost {intent.data['worst_micros']}, {planned[-1].data['left_micros']} were left"
    if played.scenario.legs and played.closed and played.outcomes[-1].state.outcome == "done":
        yield from _whole_curve(played)


def _whole_curve(played: Played) -> Iterator[str]:
    """Yield what a run that is done lacks of an unbroken run: its last checkpoint at home, each step's loss."""
    for file in checkpoint_of(STEPS):
        path = played.folder.artifacts / str(file["name"])
        is_whole = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]
        if not is_whole and played.outcomes[-1].exit_code == 0:
            yield f"it is done, and {file['name']} is not at home"
    losses = {event.step: event.loss for event in events_of(played.folder.events) if isinstance(event, StepEvent)}
    if losses != {step: loss_at(step) for step in range(1, STEPS + 1)}:
        yield "the losses are not those of an unbroken run"


def books_hold(played: Played) -> Iterator[str]:
    """P10: the audit of a closed run finds no problem.

    Two problems are excused: a cap that could not be kept, and a late deadline if a clock was set.
    """
    if not played.closed:
        return
    for row in audit(played.home).rows:
        for problem in row.problems:
            late = problem == "the cap was not kept" and (is_cap_excused(played) or _proof_was_late(played))
            set_while_asking = "the deadline is later" in problem and played.scenario.has("jump")
            if not late and not set_while_asking:
                yield problem


def is_cap_excused(played: Played) -> bool:
    """Return whether a cost was beyond gpurun's control.

    The provider made a second machine or a dearer one, was silent or refused ends; or the user was away while a machine
    had no timer. gpurun ends a second or a dearer machine when it sees it.
    """
    strange = played.scenario.has(Fault.TWICE, Fault.DEARER)
    unarmed = any(box.ends_s is None for _, box in _boxes(played))
    is_deaf = played.scenario.has("silent", "ends refused")
    return strange or (unarmed and _proof_was_late(played)) or is_deaf


def _proof_was_late(played: Played) -> bool:
    """Return whether the receipt must assume the longest time, because a machine's end could not be observed in time.

    The laptop was away, its clock was set, or the provider gave no answer or a wrong one.
    """
    absent = ("kill", "kill and reboot", "sleep", "doze", "jump")
    silent = ("silent", "ends refused", "revoked", "denied")
    return played.scenario.has(*absent, *silent, Fault.DEAF, Fault.DENIED, Fault.STALE, Fault.BROKEN)


def _boxes(played: Played) -> list[tuple[FakeCloud, Box]]:
    return [(cloud, box) for cloud in played.clouds.values() for box in cloud.boxes]


def _lives(box: Box, at_s: float) -> bool:
    return box.born_s <= at_s and (box.died_s is None or box.died_s > at_s)


def _named(played: Played, event: Event) -> list[Record]:
    return [record for record in played.records if record.event is event]


def _timed(played: Played) -> list[tuple[float, Record]]:
    return played.timed


def _instance_at(played: Played, seq: int) -> str:
    made = [r.data["instance"]["id"] for r in played.records if r.seq < seq and r.event is Event.CREATE_OBSERVED]
    return str(made[-1]) if made else ""


def _receipt(played: Played) -> dict[str, Any]:
    statement = json.loads(base64.b64decode(json.loads(played.folder.receipt.read_bytes())["payload"]))
    predicate: dict[str, Any] = statement["predicate"]
    return predicate
