"""Replays a journal into the state of its run, and derives the next step from that state.

These are pure functions, and the only place that knows what a record means for the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from gpurun.core.errors import ExitCode, as_exit_code
from gpurun.core.journal_events import (
    AddressChanged,
    CollectObserved,
    CreateIntended,
    CreateObserved,
    CreateRefused,
    DeathProven,
    HoldIntended,
    Incident,
    LegPlanned,
    MachineEndsItself,
    PriceRose,
    ReadyObserved,
    RunOpened,
    SalvageObserved,
    StepFailed,
    StopRequested,
    TrainIntended,
    TrainObserved,
)
from gpurun.core.journal_records import (
    PASSES_OVER,
    CreateAttempt,
    Dearer,
    Event,
    Extra,
    Moment,
    Phase,
    Record,
    RunState,
)
from gpurun.core.money import Micros
from gpurun.core.records import Instance
from gpurun.core.run_plan import Plan
from gpurun.core.stop_request import STRENGTH

TALK_S = 120.0
MOVES_ON_S = 3600.0
"""How long after a request another offer may still be used, because a day later the user expects no machine."""
_MOST_NAMED = 20
WORKING = (
    Phase.CREATING, Phase.CREATED, Phase.READY, Phase.SHIPPED, Phase.TRAINING, Phase.TRAINED, Phase.HELD,
)  # fmt: skip
"""The phases in which the machine is still needed, because its end has not been requested."""


class Step(StrEnum):
    """The steps of a run, of which one is taken at a time."""

    STAGE = "stage"
    CREATE = "create"
    AWAIT_READY = "await_ready"
    SHIP = "ship"
    START = "start"
    WATCH = "watch"
    COLLECT = "collect"
    HOLD = "hold"
    DESTROY = "destroy"
    SALVAGE = "salvage"
    MOVE = "move"
    SETTLE = "settle"
    CLOSE = "close"


def replay_journal(run: str, records: Sequence[Record]) -> RunState:
    """Return the state of a run after all records of its journal, in order."""
    state = RunState(run=run, phase=Phase.OPENED)
    for record in records:
        if not isinstance(record.event, Event):
            state = state.model_copy(update={"newer": state.newer or record.event})
            continue
        if change := _MARKS.get(record.event):
            state = state.model_copy(update=change)
        elif effect := _EFFECTS.get(record.event):
            state = state.model_copy(update=effect(state, record, record.typed))
    return state


def find_offer_place(state: RunState, plan: Plan) -> int:
    """Return the index of the approved offer that the run uses: the first that was not passed over."""
    return min(state.passed_over, len(plan.approved) - 1)


def next_step(state: RunState, *, lease_over: bool = False) -> Step | None:
    """Return the one step to take now; None if the run is closed. `lease_over`: the time of the lease is over."""
    abandoned = bool(state.failure or state.stop or lease_over)
    failed_in = state.failure.step if state.failure else ""
    if state.imported and state.phase not in (Phase.SETTLED, Phase.CLOSED):
        return Step.SETTLE
    match state.phase:
        case Phase.OPENED:
            if state.failure or state.stop:
                return Step.MOVE if may_move(state) else Step.SETTLE
            return Step.STAGE if state.stage == "wanted" else Step.CREATE
        case Phase.CREATING:
            # A machine that is not found after its deadline may have lived until then: its end must be proven.
            return Step.DESTROY if lease_over or state.failure else Step.CREATE
        case Phase.CREATED:
            return Step.DESTROY if abandoned or state.moves_on else Step.AWAIT_READY
        case Phase.READY:
            return Step.DESTROY if abandoned else Step.SHIP
        case Phase.SHIPPED:
            # A start without a reply may have worked. It is repeated, to stop the training and collect its files.
            may_train = state.start_asked and state.stop != "destroy" and not (state.failure or lease_over)
            return Step.DESTROY if abandoned and not may_train else Step.START
        case Phase.TRAINING:
            return Step.DESTROY if state.stop == "destroy" or lease_over else Step.WATCH
        case Phase.TRAINED:
            given_up = state.stop == "destroy" or lease_over or failed_in == Step.COLLECT
            if failed_in == Step.COLLECT and is_to_hold(state) and not lease_over:
                return Step.HOLD
            return Step.DESTROY if given_up else Step.COLLECT
        case Phase.COLLECTED:
            return Step.HOLD if is_to_hold(state) and not lease_over else Step.DESTROY
        case Phase.HELD:
            return Step.DESTROY if state.stop == "destroy" or lease_over else Step.HOLD
        case Phase.DESTROYING:
            return Step.DESTROY
        case Phase.GONE:
            is_given_up = state.stop == "destroy" and state.reason != "lease"  # The user wants none of its outputs.
            may_lack = state.pushed or state.shared == "holds"
            if may_lack and not is_given_up:
                return Step.SALVAGE
            return Step.MOVE if may_move(state) else Step.SETTLE
        case Phase.SETTLED:
            return Step.SETTLE if state.may_be_billing else Step.CLOSE
        case Phase.CLOSED:
            # An older gpurun may have closed the run too early: then it is settled again.
            return Step.SETTLE if state.may_be_billing else None


def may_move(state: RunState) -> bool:
    """Return whether the run may continue on another machine.

    This is so if its machine was taken away or lost, if none was available, or if only the time limit of the machine's
    place is over; but not after a failure or a normal end of its own work, or after a stop by the user.
    """
    if not state.legs or state.stop_of_user or state.stays or state.cancelled:
        return False
    if state.shared == "kept":  # The newest files are only on the cluster: `gpurun collect` brings them, then --from.
        return False
    failure = state.failure
    if state.overdue or (state.outcome == "stopped" and state.reason == "lease"):
        is_only_late = failure is None or failure.code in _LOST or failure.step == Step.COLLECT
        return state.limited and is_only_late and state.outcome in ("", "stopped", "lost")
    if state.phase is Phase.OPENED:
        return failure is not None and failure.step == Step.CREATE and failure.code in _NOT_TO_BE_HAD
    is_ended = failure is not None and failure.code in _LOST and state.outcome in ("", "done")
    return state.outcome == "lost" or (state.outcome == "failed" and state.reason == "preempted") or is_ended


def waits_for_machine(state: RunState) -> bool:
    """Return whether a run has no machine now, and will continue on another machine once one is available."""
    return state.phase in (Phase.GONE, Phase.OPENED) and not state.may_be_billing and may_move(state)


_NOT_TO_BE_HAD = frozenset({"create.no_capacity", "create.cannot_look", "price.rose", "price.unknown"})
"""The codes of failed create steps after which a machine may be available later."""
_LOST = frozenset({"machine.lost", "boot.gone", "boot.timeout"})
"""The codes of failures in which a machine was taken away, was ended by its provider, or never answered."""
CANCELLED = "cancelled"
"""The `reason` of a training that ended because its user ended the machine outside of gpurun."""


def is_to_hold(state: RunState) -> bool:
    """Return whether the machine should be held now: its end would remove finished files that are not at home."""
    is_wanted = state.stop != "destroy" and state.outcome != "lost"
    may_hold = state.hold_s > 0 and state.held_at is None and state.instance is not None
    return may_hold and is_wanted and (state.elsewhere > 0 or is_lacking(state))


def is_lacking(state: RunState) -> bool:
    """Return whether the collect step failed to download finished files, although the machine was not gone."""
    failure = state.failure
    return failure is not None and failure.step == Step.COLLECT and failure.exit_code is ExitCode.COLLECT_FAILED


def exit_code_of(state: RunState) -> ExitCode:
    """Return the exit code of `gpurun train` for a run in this state."""
    if state.may_be_billing:
        return ExitCode.MAY_BE_BILLING
    if state.failure:
        code = as_exit_code(state.failure.exit_code)
        # For a run that has already paid for a machine, "no offer" would be wrong: it failed.
        is_paid = state.leg > 1 or state.outcome in ("failed", "lost")
        if state.failure.step == Step.MOVE and state.reason == "lease":
            return ExitCode.BUDGET_STOP
        return ExitCode.TRAINING_FAILED if code is ExitCode.NO_OFFER and is_paid else code
    if state.outcome in ("failed", "lost"):
        return ExitCode.TRAINING_FAILED
    if state.reason == "lease":
        return ExitCode.BUDGET_STOP
    if state.stop == "destroy" or (state.stop and not state.outcome) or (state.signal and state.outcome == "stopped"):
        return ExitCode.TERMINATED if state.signal == "SIGTERM" else ExitCode.INTERRUPTED
    return ExitCode.TRAINING_FAILED if state.elsewhere else ExitCode.DONE


def _run_opened(state: RunState, record: Record, opened: RunOpened) -> dict[str, Any]:
    stage = "wanted" if opened.stage else ""
    return {"stage": stage, "imported": bool(opened.imported), "legs": opened.legs}


def _create_intended(state: RunState, record: Record, intent: CreateIntended) -> dict[str, Any]:
    return {
        "phase": Phase.CREATING,
        "attempt": intent.attempt,
        "token": intent.token,
        "provider": intent.provider,
        "account": intent.account,
        "shared": "empty" if intent.lease.queue_s else "",
        "instance": None,
        "rated": False,
        "was_gone": False,
        "moved": False,
        "deadline_wall": intent.deadline_wall,
        "requested_at": Moment.from_record(record),
        "heard_at": Moment.from_record(record),
        "dearer": (),
        "timer_shares_key": intent.timer_shares_key,
        "armed": False,
        "ends_wall": None,
        "hold_s": intent.hold_s,
        "limited": bool(state.legs and intent.lease.limit_s),
        "attempts": {**state.attempts, intent.token: _build_attempt(record, intent, state.leg)},
    }


def _build_attempt(record: Record, intent: CreateIntended, leg: int) -> CreateAttempt:
    """Return the create attempt that an intent records; `leg` is the number of the current leg."""
    return CreateAttempt(
        token=intent.token,
        provider=intent.provider,
        region=str(intent.offer.get("region", "")),
        micros_per_hour=Micros(intent.rate_micros_per_hour),
        beside_micros_per_hour=Micros(intent.beside_micros_per_hour),
        billing_unit_s=intent.billing_unit_s,
        worst_micros=Micros(intent.worst_micros),
        spent_micros=Micros(intent.spent_micros),
        at=Moment.from_record(record),
        leg=leg,
    )


def _set_attempt_answer(state: RunState, answer: str) -> dict[str, CreateAttempt]:
    """Return all create attempts, with the outcome of the current one set to `answer`."""
    if state.token not in state.attempts:
        return state.attempts
    return {**state.attempts, state.token: state.attempts[state.token].model_copy(update={"answer": answer})}


def _create_observed(state: RunState, record: Record, created: CreateObserved) -> dict[str, Any]:
    return {
        "phase": Phase.CREATED,
        "instance": created.instance,
        "attempts": _set_attempt_answer(state, "made"),
        "heard_at": Moment.from_record(record),
    }


def _ready_observed(state: RunState, record: Record, ready: ReadyObserved) -> dict[str, Any]:
    instance: Instance = ready.instance
    before = state.instance
    if before is not None and before.started_wall is not None:  # A later start would make the lease longer.
        first_wall = min(before.started_wall, instance.started_wall or before.started_wall)
        instance = instance.model_copy(update={"started_wall": first_wall})
    return {
        "phase": Phase.READY,
        "instance": instance,
        "facts": ready.facts,
        "clock_ahead_s": _compute_clock_ahead_s(record, ready.facts),
        "armed": ready.armed is not None,
    }


def _compute_clock_ahead_s(record: Record, facts: dict[str, Any]) -> float:
    """Return how far the machine's clock is ahead; 0 below TALK_S, because its time was read some time before."""
    ahead_s = float(facts.get("wall", record.wall)) - record.wall
    return ahead_s if abs(ahead_s) > TALK_S else 0.0


def _create_refused(state: RunState, record: Record, refused: CreateRefused) -> dict[str, Any]:
    passed_over = state.passed_over + (refused.reason in PASSES_OVER)
    attempts = _set_attempt_answer(state, "unseen" if refused.reason == "absent" else "refused")
    nothing: dict[str, Any] = {"token": "", "instance": None, "deadline_wall": None, "attempts": attempts}
    return {"phase": Phase.OPENED, "passed_over": passed_over, **nothing}


def _train_observed(state: RunState, record: Record, ended: TrainObserved) -> dict[str, Any]:
    outputs = ended.outputs or {}
    # The machine's end does not remove files that are kept, and the user does not want those that are given up.
    is_settled = outputs.get("kept") or outputs.get("given_up")
    elsewhere = 0 if is_settled else int((outputs.get("elsewhere") or {}).get("files", 0))
    left = {"elsewhere": elsewhere, "unpublished": dict(outputs.get("unpublished") or {})}
    return {
        "phase": Phase.TRAINED,
        "silent_since_wall": None,
        "outcome": ended.outcome,
        "reason": ended.reason,
        "cancelled": ended.reason == CANCELLED,
        **left,
    }


def _stop_requested(state: RunState, record: Record, request: StopRequested) -> dict[str, Any]:
    is_stronger = STRENGTH[request.how] > STRENGTH[state.stop]
    stop = {"stop": request.how, "signal": request.signal} if is_stronger else {}
    is_of_place = request.by == "lease" and state.limited and not state.stop
    return {**stop, "overdue": is_of_place, "reason": "lease" if request.by == "lease" else state.reason}


def _collect_observed(state: RunState, record: Record, collected: CollectObserved) -> dict[str, Any]:
    """Return the changes by the end of a download. Missing files are a failure, even if no `step.failed` follows."""
    phase = Phase.HELD if state.phase is Phase.HELD else Phase.COLLECTED
    if not collected.missing:
        # If the missing files came home while the machine was held, the collect step has not failed.
        cleared = {"failure": state.earlier} if is_lacking(state) and phase is Phase.HELD else {}
        # The last list of a lost machine may be older than its last checkpoint, which may be in the bucket.
        here: dict[str, Any] = {"pushed": "", "shared": "empty" if state.shared else ""}
        return {"phase": phase, **cleared} | ({} if collected.remembered else here)
    failure = StepFailed(
        step=Step.COLLECT,
        code="collect.missing",
        message=f"{_count_missing(collected)} finished files on the machine did not come home"
        f"{_describe_missing(collected)}.",
        hint="The verified files are in artifacts/; the receipt lists them, and the missing ones.",
        exit_code=ExitCode.COLLECT_FAILED,
    )
    return {"phase": phase, "failure": failure, "earlier": state.earlier or state.failure}


def _count_missing(collected: CollectObserved) -> int:
    """Return how many files are missing in all, also those that the record does not name."""
    unpublished, listed = collected.unpublished or {}, collected.missing_files
    named = listed["files"] if listed else len(collected.missing)
    return named + max(0, int(unpublished.get("files", 0)) - len(unpublished.get("first", ())))


def _describe_missing(collected: CollectObserved) -> str:
    """Return the size of the missing files, if it is known, and the first of their names, in words."""
    size, names = collected.missing_bytes, collected.missing
    shown = "" if size is None else f" ({size:,} bytes)"
    return f"{shown}: {', '.join(names[:_MOST_NAMED])}{' and more' if names[_MOST_NAMED:] else ''}"


def _hold_intended(state: RunState, record: Record, hold: HoldIntended) -> dict[str, Any]:
    until_wall, why = float(hold.until_wall), hold.message
    return {"phase": Phase.HELD, "held_at": Moment.from_record(record), "hold_until_wall": until_wall, "hold_why": why}


def _salvage_observed(state: RunState, record: Record, salvaged: SalvageObserved) -> dict[str, Any]:
    """Return the changes by a salvage: whether the cluster's folder still has files, and the folder in the bucket.

    The bucket is searched again only if the cluster's folder still has files.
    """
    shared = state.shared if salvaged.shared is None else salvaged.shared
    return {"shared": shared, "pushed": state.pushed if salvaged.shared == "kept" else ""}


def _step_failed(state: RunState, record: Record, failure: StepFailed) -> dict[str, Any]:
    failed: dict[str, Any] = {"failure": state.failure or failure}
    if failure.step == Step.COLLECT:
        # For the exit code, lost files matter more than why the training ended.
        failed["failure"] = failure
        failed["earlier"] = state.failure if state.failure and not is_lacking(state) else state.earlier
    if failure.step == Step.MOVE:  # This failure states why the run cannot continue, and what could have helped.
        failed |= {"stays": True, "failure": failure, "earlier": state.failure}
    if failure.step == Step.HOLD:
        failed["phase"] = Phase.COLLECTED
    if failure.step == Step.WATCH:
        failed["phase"] = Phase.TRAINED
    if failure.step == Step.SALVAGE:
        failed["pushed"] = ""  # The step is not retried; the user can run `gpurun collect`.
        failed["shared"] = "kept" if state.shared else ""
    return failed


def _death_proven(state: RunState, record: Record, proof: DeathProven) -> dict[str, Any]:
    """Return the changes by a proof: the machine is gone, and so are the extra machines with its token.

    If the machine was shown as gone before it was ready, the next offer is used, or the run fails if it is too late.
    """
    gone = {name: extra for name, extra in state.extras.items() if extra.ended is None and extra.token == state.token}
    ended = {name: extra.model_copy(update={"ended": Moment.from_record(record)}) for name, extra in gone.items()}
    proven: dict[str, Any] = {
        "phase": Phase.GONE,
        "teardown": proof.teardown,
        "extras": {**state.extras, **ended},
    }
    if not state.moves_on or state.stop or state.failure or state.requested_at is None:
        return proven
    if state.requested_at.seconds_until(Moment.from_record(record)) > MOVES_ON_S:
        failure = StepFailed(
            step=Step.AWAIT_READY,
            code="boot.gone",
            message=state.moves_on,
            hint="Train again.",
            exit_code=ExitCode.NO_OFFER,
        )
        return {**proven, "failure": failure}
    nothing: dict[str, Any] = {"token": "", "instance": None, "deadline_wall": None, "moves_on": ""}
    return {**proven, "phase": Phase.OPENED, "passed_over": state.passed_over + 1, **nothing}


def _incident(state: RunState, record: Record, incident: Incident) -> dict[str, Any]:
    """Return the changes by an incident. Extra machines and leftovers count as billed until another incident ends them.

    When nothing of a closed run is billed any more, its exit code is computed again.
    """
    if isinstance(incident, MachineEndsItself):
        return {"ends_wall": incident.ends_wall}
    if isinstance(incident, AddressChanged) and state.instance is not None:
        return {
            "instance": state.instance.model_copy(update={"address": incident.instance.address}),
            "moved": True,
        }
    extras, leftover, dearer = dict(state.extras), dict.fromkeys(state.leftover), state.dearer
    name, token = incident.id, incident.token
    match incident.code:
        case "machine.gone" | "machine.back":
            return {"was_gone": incident.code == "machine.gone"}
        case "job.silent" | "job.heard":
            return {"silent_since_wall": incident.since_wall}
        case "boot.gone" if token == state.token:
            return {"moves_on": incident.message}
        case "create.late" | "create.duplicate" if name:
            extras[name] = Extra(token=token)
        case "create.late_gone" | "create.duplicate_gone" if name in extras:
            extras[name] = extras[name].model_copy(update={"ended": Moment.from_record(record)})
        case "leftover" if incident.billed:
            leftover[token] = None
        case "leftover_gone":
            leftover.pop(token, None)
        case "price.rose" if isinstance(incident, PriceRose):
            rate = Micros(incident.rate_micros_per_hour)
            dearer = (*dearer, Dearer(micros_per_hour=rate, since_wall=incident.since_wall))
        case _:
            return {}
    changed = {"extras": extras, "leftover": tuple(leftover), "dearer": dearer}
    after = state.model_copy(update=changed)
    is_over = after.phase is Phase.CLOSED and not after.may_be_billing
    return changed | ({"exit_code": int(exit_code_of(after))} if is_over else {})


def _train_intended(state: RunState, record: Record, start: TrainIntended) -> dict[str, Any]:
    return {
        "start_asked": True,
        "shared": "holds" if state.shared else "",
        "hard_stop_wall": start.hard_stop_wall,
        "pushed": start.pushed,
        "linger_s": start.linger_s,
    }


_OF_ONE_MACHINE = (
    "passed_over", "moves_on", "token", "account", "instance", "facts", "pushed", "shared", "clock_ahead_s",
    "start_asked", "hard_stop_wall", "linger_s", "rated", "was_gone", "silent_since_wall", "deadline_wall",
    "timer_shares_key", "armed", "ends_wall", "requested_at", "heard_at", "outcome", "reason", "failure", "earlier",
    "hold_s", "held_at", "hold_until_wall", "hold_why", "elsewhere", "unpublished", "teardown", "dearer", "moved",
    "limited", "overdue",
)  # fmt: skip
"""The fields about the current machine and its work, which a move to the next machine sets to their defaults."""


def _leg_planned(state: RunState, record: Record, leg: LegPlanned) -> dict[str, Any]:
    usual = {name: RunState.model_fields[name].get_default(call_default_factory=True) for name in _OF_ONE_MACHINE}
    return {
        **usual,
        "phase": Phase.OPENED,
        "stop": state.stop_of_user,
        "leg": leg.number,
        "leg_at": Moment.from_record(record),
        "leg_plan": leg.plan,
        "leg_plan_sha256": leg.plan_sha256,
        "leg_step": leg.step,
        "fruitless": leg.fruitless,
        "attempts_before": state.attempt,
        "events_before": leg.events_bytes,
        "log_before": leg.log_bytes,
    }


_MARKS: dict[Event, dict[str, Any]] = {
    Event.STAGE_OBSERVED: {"stage": "done"},
    Event.SHIP_OBSERVED: {"phase": Phase.SHIPPED},
    Event.RATE_OBSERVED: {"rated": True},
    Event.HOLD_OBSERVED: {"phase": Phase.COLLECTED},
    Event.DESTROY_INTENDED: {"phase": Phase.DESTROYING},
    Event.DEATH_READ: {"was_gone": True},
    Event.RECEIPT_OBSERVED: {"phase": Phase.SETTLED},
}
"""The fixed changes by an event, for events in which no field of the record matters."""
_EFFECTS: dict[Event, Callable[[RunState, Record, Any], dict[str, Any]]] = {
    Event.RUN_OPENED: _run_opened,
    Event.CREATE_INTENDED: _create_intended,
    Event.CREATE_OBSERVED: _create_observed,
    Event.CREATE_REFUSED: _create_refused,
    Event.CREATE_UNKNOWN: lambda state, record, typed: {"heard_at": Moment.from_record(record)},
    Event.READY_OBSERVED: _ready_observed,
    Event.TRAIN_INTENDED: _train_intended,
    Event.TRAIN_STARTED: lambda state, record, started: {"phase": Phase.TRAINING, "pushed": started.pushed},
    Event.TRAIN_OBSERVED: _train_observed,
    Event.STOP_REQUESTED: _stop_requested,
    Event.COLLECT_OBSERVED: _collect_observed,
    Event.HOLD_INTENDED: _hold_intended,
    Event.DEATH_PROVEN: _death_proven,
    Event.SALVAGE_OBSERVED: _salvage_observed,
    Event.STEP_FAILED: _step_failed,
    Event.INCIDENT: _incident,
    Event.LEG_PLANNED: _leg_planned,
    Event.RUN_CLOSED: lambda state, record, closed: {"phase": Phase.CLOSED, "exit_code": int(closed.exit_code)},
}
