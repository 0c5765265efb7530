"""A journal, replayed: pure, total, and the only place that knows what a record means for what comes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from gpurun.core.errors import ExitCode
from gpurun.core.model import Instance, Teardown
from gpurun.core.plan import Plan
from gpurun.core.progress import PASSES_OVER, Event, Phase, Record, RunState
from gpurun.lifecycle.control import STRENGTH

TALK_S = 120.0


class Step(StrEnum):
    """What can be done next."""

    STAGE = "stage"
    CREATE = "create"
    AWAIT_READY = "await_ready"
    SHIP = "ship"
    START = "start"
    WATCH = "watch"
    COLLECT = "collect"
    DESTROY = "destroy"
    SALVAGE = "salvage"
    SETTLE = "settle"
    CLOSE = "close"


def replay(run: str, records: Sequence[Record]) -> RunState:
    """Fold a journal into the state it leaves a run in."""
    state = RunState(run=run, phase=Phase.OPENED)
    for record in records:
        effect = _EFFECTS.get(record.event)
        if effect is not None:
            state = state.model_copy(update=effect(state, record))
    return state


def place_of(state: RunState, plan: Plan) -> int:
    """Which approved offer the run is about: the first, but for those that could not be had."""
    return min(state.passed_over, len(plan.approved) - 1)


def next_step(state: RunState, *, lease_over: bool = False) -> Step | None:
    """The one thing to do now; None when the run is closed."""
    abandoned = bool(state.failure or state.stop or lease_over)
    failed_in = str((state.failure or {}).get("step", ""))
    match state.phase:
        case Phase.OPENED:
            if state.failure or state.stop:
                return Step.SETTLE
            return Step.STAGE if state.stage == "wanted" else Step.CREATE
        case Phase.CREATING:
            # What is not found after its deadline may have lived until then: it is proven dead, and paid for.
            return Step.DESTROY if lease_over or state.failure else Step.CREATE
        case Phase.CREATED:
            return Step.DESTROY if abandoned else Step.AWAIT_READY
        case Phase.READY:
            return Step.DESTROY if abandoned else Step.SHIP
        case Phase.SHIPPED:
            # An answer that was lost may have been a yes: asked once more, what trains is stopped, and comes home.
            may_train = state.start_asked and state.stop != "destroy" and not (state.failure or lease_over)
            return Step.DESTROY if abandoned and not may_train else Step.START
        case Phase.TRAINING:
            return Step.DESTROY if state.stop == "destroy" or lease_over else Step.WATCH
        case Phase.TRAINED:
            given_up = state.stop == "destroy" or lease_over or failed_in == Step.COLLECT
            return Step.DESTROY if given_up else Step.COLLECT
        case Phase.COLLECTED | Phase.DESTROYING:
            return Step.DESTROY
        case Phase.GONE:
            is_given_up = state.stop == "destroy" and state.reason != "lease"  # By somebody who wanted nothing of it.
            return Step.SALVAGE if state.pushed and not is_given_up else Step.SETTLE
        case Phase.SETTLED:
            return Step.SETTLE if state.may_be_billing else Step.CLOSE
        case Phase.CLOSED:
            # Only what was closed too early, by a gpurun that did so, is settled once more.
            return Step.SETTLE if state.may_be_billing else None


def exit_code_of(state: RunState) -> ExitCode:
    """The code with which `train` ends for a run that came to this state."""
    if state.may_be_billing:
        return ExitCode.MAY_BE_BILLING
    if state.failure:
        return ExitCode(int(state.failure["exit_code"]))
    if state.outcome in ("failed", "lost"):
        return ExitCode.TRAINING_FAILED
    if state.reason == "lease":
        return ExitCode.BUDGET_STOP
    if state.stop == "destroy" or (state.stop and not state.outcome):
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def _create_intended(state: RunState, record: Record) -> dict[str, Any]:
    data = record.data
    return {
        "phase": Phase.CREATING,
        "attempt": data["attempt"],
        "token": data["token"],
        "provider": data["provider"],
        "account": data.get("account", ""),
        "instance": None,
        "rated": False,
        "deadline_wall": data["deadline_wall"],
        "create_wall": record.wall,
        "create_mono": record.mono,
        "create_boot_id": record.boot_id,
        **_heard(record),
    }


def _heard(record: Record) -> dict[str, Any]:
    return {"heard_wall": record.wall, "heard_mono": record.mono, "heard_boot_id": record.boot_id}


def _create_observed(state: RunState, record: Record) -> dict[str, Any]:
    return {
        "phase": Phase.CREATED,
        "instance": Instance.model_validate(record.data["instance"]),
        **_heard(record),
    }


def _ready_observed(state: RunState, record: Record) -> dict[str, Any]:
    instance = Instance.model_validate(record.data["instance"])
    facts = record.data["facts"]
    return {"phase": Phase.READY, "instance": instance, "facts": facts, "clock_ahead_s": _clock_ahead_s(record, facts)}


def _clock_ahead_s(record: Record, facts: dict[str, Any]) -> float:
    """How far the machine's clock is ahead: it told its time some seconds before the record, up to a minute or two."""
    ahead_s = float(facts.get("wall", record.wall)) - record.wall
    return ahead_s if abs(ahead_s) > TALK_S else 0.0


def _create_refused(state: RunState, record: Record) -> dict[str, Any]:
    passed_over = state.passed_over + (record.data["reason"] in PASSES_OVER)
    nothing = {"token": "", "instance": None, "deadline_wall": None}
    return {"phase": Phase.OPENED, "passed_over": passed_over, **nothing}


def _train_observed(state: RunState, record: Record) -> dict[str, Any]:
    return {"phase": Phase.TRAINED, "outcome": record.data["outcome"], "reason": record.data["reason"]}


def _stop_requested(state: RunState, record: Record) -> dict[str, Any]:
    how = str(record.data["how"])
    stop = how if STRENGTH[how] > STRENGTH[state.stop] else state.stop
    return {"stop": stop, "reason": "lease" if record.data["by"] == "lease" else state.reason}


def _collect_observed(state: RunState, record: Record) -> dict[str, Any]:
    """What did not come home is a failure by this record alone, so that a crash right after it makes no success."""
    missing = record.data.get("missing")
    if not missing:
        # What a machine that is lost had finished last is only remembered: the bucket may have newer checkpoints.
        return {"phase": Phase.COLLECTED} | ({} if record.data.get("remembered") else {"pushed": ""})
    failure = {
        "step": str(Step.COLLECT),
        "code": "collect.missing",
        "message": f"{len(missing)} of the files that the instance announced did not come home.",
        "hint": "What was verified is in artifacts/; the receipt names it.",
        "exit_code": int(ExitCode.COLLECT_FAILED),
    }
    return {"phase": Phase.COLLECTED, "failure": failure}


def _step_failed(state: RunState, record: Record) -> dict[str, Any]:
    failed: dict[str, Any] = {"failure": dict(record.data) if state.failure is None else state.failure}
    if record.data["step"] == Step.COLLECT:
        # What was lost on the way home matters more to a script than why training ended.
        failed["failure"] = dict(record.data)
    if record.data["step"] == Step.WATCH:
        failed["phase"] = Phase.TRAINED
    if record.data["step"] == Step.SALVAGE:
        failed["pushed"] = ""  # It is not tried for ever; `gpurun collect` tries it again.
    return failed


def _death_proven(state: RunState, record: Record) -> dict[str, Any]:
    return {"phase": Phase.GONE, "teardown": Teardown(record.data["teardown"])}


def _incident(state: RunState, record: Record) -> dict[str, Any]:
    """What came late or was left and is billed stays open until it is gone; a run closed before has its code then."""
    late, leftover = dict(state.late), dict.fromkeys(state.leftover)
    name, token = str(record.data.get("id", "")), str(record.data.get("token", ""))
    match record.data["code"]:
        case "create.late":
            late[name] = token
        case "create.late_gone":
            late.pop(name, None)
        case "leftover" if record.data.get("billed"):
            leftover[token] = None
        case "leftover_gone":
            leftover.pop(token, None)
        case _:
            return {}
    changed = {"late": late, "leftover": tuple(leftover)}
    after = state.model_copy(update=changed)
    is_over = after.phase is Phase.CLOSED and not after.may_be_billing
    return changed | ({"exit_code": int(exit_code_of(after))} if is_over else {})


def _to(phase: Phase) -> Callable[[RunState, Record], dict[str, Any]]:
    return lambda state, record: {"phase": phase}


_EFFECTS: dict[Event, Callable[[RunState, Record], dict[str, Any]]] = {
    Event.RUN_OPENED: lambda state, record: {"stage": "wanted" if record.data.get("stage") else ""},
    Event.STAGE_OBSERVED: lambda state, record: {"stage": "done"},
    Event.CREATE_INTENDED: _create_intended,
    Event.CREATE_OBSERVED: _create_observed,
    Event.CREATE_REFUSED: _create_refused,
    Event.CREATE_UNKNOWN: lambda state, record: _heard(record),
    Event.READY_OBSERVED: _ready_observed,
    Event.SHIP_OBSERVED: _to(Phase.SHIPPED),
    Event.TRAIN_INTENDED: lambda state, record: {"start_asked": True, "pushed": record.data.get("pushed", "")},
    Event.TRAIN_STARTED: lambda state, record: {"phase": Phase.TRAINING, "pushed": record.data.get("pushed", "")},
    Event.RATE_OBSERVED: lambda state, record: {"rated": True},
    Event.TRAIN_OBSERVED: _train_observed,
    Event.STOP_REQUESTED: _stop_requested,
    Event.COLLECT_OBSERVED: _collect_observed,
    Event.DESTROY_INTENDED: _to(Phase.DESTROYING),
    Event.DEATH_PROVEN: _death_proven,
    Event.SALVAGE_OBSERVED: lambda state, record: {"pushed": ""},
    Event.STEP_FAILED: _step_failed,
    Event.INCIDENT: _incident,
    Event.RECEIPT_OBSERVED: _to(Phase.SETTLED),
    Event.RUN_CLOSED: lambda state, record: {"phase": Phase.CLOSED, "exit_code": record.data["exit_code"]},
}
