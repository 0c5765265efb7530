"""A journal, replayed: pure, total, and the only place that knows what a record means for what comes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import PASSES_OVER, Asked, Dearer, Event, Extra, Moment, Phase, Record, RunState
from gpurun.core.money import Micros
from gpurun.core.records import Instance, Teardown
from gpurun.core.run_plan import Plan
from gpurun.core.stop_request import STRENGTH
from gpurun.core.untrusted import number

TALK_S = 120.0
MOVES_ON_S = 3600.0
"""So long after an asking another offer may still be taken: nobody expects a machine the day after."""
_MOST_NAMED = 20
WORKING = (
    Phase.CREATING, Phase.CREATED, Phase.READY, Phase.SHIPPED, Phase.TRAINING, Phase.TRAINED, Phase.HELD,
)  # fmt: skip
"""While something of a machine is still wanted: until its end is asked for."""


class Step(StrEnum):
    """What can be done next."""

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
    SETTLE = "settle"
    CLOSE = "close"


def replay(run: str, records: Sequence[Record]) -> RunState:
    """Fold a journal into the state it leaves a run in."""
    state = RunState(run=run, phase=Phase.OPENED)
    for record in records:
        if not isinstance(record.event, Event):
            state = state.model_copy(update={"newer": state.newer or record.event})
            continue
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
    if state.imported and state.phase not in (Phase.SETTLED, Phase.CLOSED):
        return Step.SETTLE
    match state.phase:
        case Phase.OPENED:
            if state.failure or state.stop:
                return Step.SETTLE
            return Step.STAGE if state.stage == "wanted" else Step.CREATE
        case Phase.CREATING:
            # What is not found after its deadline may have lived until then: it is proven dead, and paid for.
            return Step.DESTROY if lease_over or state.failure else Step.CREATE
        case Phase.CREATED:
            return Step.DESTROY if abandoned or state.moves_on else Step.AWAIT_READY
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
            is_given_up = state.stop == "destroy" and state.reason != "lease"  # By somebody who wanted nothing of it.
            may_lack = state.pushed or state.shared == "holds"
            return Step.SALVAGE if may_lack and not is_given_up else Step.SETTLE
        case Phase.SETTLED:
            return Step.SETTLE if state.may_be_billing else Step.CLOSE
        case Phase.CLOSED:
            # Only what was closed too early, by a gpurun that did so, is settled once more.
            return Step.SETTLE if state.may_be_billing else None


def is_to_hold(state: RunState) -> bool:
    """Whether the machine is to be held: its end would take away what is finished there and not at home."""
    is_wanted = state.stop != "destroy" and state.outcome != "lost"
    may_hold = state.hold_s > 0 and state.held_at is None and state.instance is not None
    return may_hold and is_wanted and (state.elsewhere > 0 or is_lacking(state))


def is_lacking(state: RunState) -> bool:
    """Whether finished files did not come home, and not because the machine is gone."""
    failure = state.failure or {}
    return failure.get("step") == Step.COLLECT and failure.get("exit_code") == int(ExitCode.COLLECT_FAILED)


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
    if state.stop == "destroy" or (state.stop and not state.outcome) or (state.signal and state.outcome == "stopped"):
        return ExitCode.TERMINATED if state.signal == "SIGTERM" else ExitCode.INTERRUPTED
    return ExitCode.TRAINING_FAILED if state.elsewhere else ExitCode.DONE


def _run_opened(state: RunState, record: Record) -> dict[str, Any]:
    stage = "wanted" if record.data.get("stage") else ""
    return {"stage": stage, "imported": bool(record.data.get("imported"))}


def _create_intended(state: RunState, record: Record) -> dict[str, Any]:
    data = record.data
    return {
        "phase": Phase.CREATING,
        "attempt": data["attempt"],
        "token": data["token"],
        "provider": data["provider"],
        "account": data.get("account", ""),
        "shared": "empty" if data.get("lease", {}).get("queue_s") else "",
        "instance": None,
        "rated": False,
        "was_gone": False,
        "moved": False,
        "deadline_wall": data["deadline_wall"],
        "asked_at": Moment.of(record),
        "heard_at": Moment.of(record),
        "dearer": (),
        "timer_shares_key": data.get("timer_shares_key"),
        "armed": False,
        "ends_wall": None,
        "hold_s": data.get("hold_s", 0.0),
        "asked": {**state.asked, data["token"]: _asked(record)},
    }


def _asked(record: Record) -> Asked:
    """The asking of an intent."""
    data = record.data
    return Asked(
        token=data["token"],
        provider=data["provider"],
        region=str((data.get("offer") or {}).get("region", "")),
        micros_per_hour=Micros(data.get("rate_micros_per_hour", 0)),
        beside_micros_per_hour=Micros(data.get("beside_micros_per_hour", 0)),
        billing_unit_s=data.get("billing_unit_s", 0),
        worst_micros=Micros(data.get("worst_micros", 0)),
        at=Moment.of(record),
    )


def _answered(state: RunState, answer: str) -> dict[str, Asked]:
    """All askings, with what became of the current one."""
    if state.token not in state.asked:
        return state.asked
    return {**state.asked, state.token: state.asked[state.token].model_copy(update={"answer": answer})}


def _create_observed(state: RunState, record: Record) -> dict[str, Any]:
    return {
        "phase": Phase.CREATED,
        "instance": Instance.model_validate(record.data["instance"]),
        "asked": _answered(state, "made"),
        "heard_at": Moment.of(record),
    }


def _ready_observed(state: RunState, record: Record) -> dict[str, Any]:
    instance, before = Instance.model_validate(record.data["instance"]), state.instance
    if before is not None and before.started_wall is not None:  # A later start would make the lease longer.
        first_wall = min(before.started_wall, instance.started_wall or before.started_wall)
        instance = instance.model_copy(update={"started_wall": first_wall})
    facts = record.data["facts"]
    clock_ahead_s, armed = _clock_ahead_s(record, facts), record.data.get("armed", True) is not None
    return {"phase": Phase.READY, "instance": instance, "facts": facts, "clock_ahead_s": clock_ahead_s, "armed": armed}


def _clock_ahead_s(record: Record, facts: dict[str, Any]) -> float:
    """How far the machine's clock is ahead: it told its time some seconds before the record, up to a minute or two."""
    ahead_s = float(facts.get("wall", record.wall)) - record.wall
    return ahead_s if abs(ahead_s) > TALK_S else 0.0


def _create_refused(state: RunState, record: Record) -> dict[str, Any]:
    passed_over = state.passed_over + (record.data["reason"] in PASSES_OVER)
    asked = _answered(state, "unseen" if record.data["reason"] == "absent" else "refused")
    nothing: dict[str, Any] = {"token": "", "instance": None, "deadline_wall": None, "asked": asked}
    return {"phase": Phase.OPENED, "passed_over": passed_over, **nothing}


def _train_observed(state: RunState, record: Record) -> dict[str, Any]:
    outputs = record.data.get("outputs") or {}
    # Those that are kept lie where the machine's end takes nothing away.
    elsewhere = 0 if outputs.get("kept") else int((outputs.get("elsewhere") or {}).get("files", 0))
    left = {"elsewhere": elsewhere, "unpublished": dict(outputs.get("unpublished") or {})}
    ended = {"outcome": record.data["outcome"], "reason": record.data["reason"]}
    return {"phase": Phase.TRAINED, "silent_since_wall": None, **ended, **left}


def _stop_requested(state: RunState, record: Record) -> dict[str, Any]:
    how = str(record.data["how"])
    is_stronger = STRENGTH[how] > STRENGTH[state.stop]
    asked = {"stop": how, "signal": record.data.get("signal", "")} if is_stronger else {}
    return {**asked, "reason": "lease" if record.data["by"] == "lease" else state.reason}


def _collect_observed(state: RunState, record: Record) -> dict[str, Any]:
    """What did not come home is a failure by this record alone, so that a crash right after it makes no success."""
    missing, phase = record.data.get("missing"), Phase.HELD if state.phase is Phase.HELD else Phase.COLLECTED
    if not missing:
        # What came while the machine was held counts as if it had come at first.
        mended = {"failure": state.earlier} if is_lacking(state) and phase is Phase.HELD else {}
        # What a machine that is lost had finished last is only remembered: the bucket may have newer checkpoints.
        here: dict[str, Any] = {"pushed": "", "shared": "empty" if state.shared else ""}
        return {"phase": phase, **mended} | ({} if record.data.get("remembered") else here)
    failure = {
        "step": str(Step.COLLECT),
        "code": "collect.missing",
        "message": f"{_count(record)} files that are finished on the machine did not come home{_named(record)}.",
        "hint": "What was verified is in artifacts/; the receipt names it, and what is missing.",
        "exit_code": int(ExitCode.COLLECT_FAILED),
    }
    return {"phase": phase, "failure": failure, "earlier": state.earlier or state.failure}


def _count(record: Record) -> int:
    """How many files are missing; of those that the machine could not list only the first are named."""
    unpublished, missing = record.data.get("unpublished") or {}, record.data["missing"]
    named = int(record.data.get("missing_files", {}).get("files", len(missing)))
    return named + max(0, int(unpublished.get("files", 0)) - len(unpublished.get("first", ())))


def _named(record: Record) -> str:
    """Their size and the first of their names, where the record has them."""
    size, names = record.data.get("missing_bytes"), [str(name) for name in record.data["missing"]]
    told = f" ({size:,} bytes)" if isinstance(size, int) else ""
    return f"{told}: {', '.join(names[:_MOST_NAMED])}{' and more' if names[_MOST_NAMED:] else ''}"


def _hold_intended(state: RunState, record: Record) -> dict[str, Any]:
    why, until_wall = str(record.data.get("message", "")), float(record.data["until_wall"])
    return {"phase": Phase.HELD, "held_at": Moment.of(record), "hold_until_wall": until_wall, "hold_why": why}


def _salvage_observed(state: RunState, record: Record) -> dict[str, Any]:
    """What did not come from a cluster's folder stays there; the bucket may have it then."""
    shared = record.data.get("shared", state.shared)
    return {"shared": shared, "pushed": state.pushed if "shared" in record.data and shared == "kept" else ""}


def _step_failed(state: RunState, record: Record) -> dict[str, Any]:
    failed: dict[str, Any] = {"failure": dict(record.data) if state.failure is None else state.failure}
    if record.data["step"] == Step.COLLECT:
        # What was lost on the way home matters more to a script than why training ended.
        failed["failure"] = dict(record.data)
        failed["earlier"] = state.failure if state.failure and not is_lacking(state) else state.earlier
    if record.data["step"] == Step.HOLD:
        failed["phase"] = Phase.COLLECTED
    if record.data["step"] == Step.WATCH:
        failed["phase"] = Phase.TRAINED
    if record.data["step"] == Step.SALVAGE:
        failed["pushed"] = ""  # It is not tried for ever; `gpurun collect` tries it again.
        failed["shared"] = "kept" if state.shared else ""
    return failed


def _death_proven(state: RunState, record: Record) -> dict[str, Any]:
    """The proof is of all that carries the token: what was found beside the machine is gone with it."""
    gone = {name: one for name, one in state.extras.items() if one.ended is None and one.token == state.token}
    ended = {name: one.model_copy(update={"ended": Moment.of(record)}) for name, one in gone.items()}
    extras = {**state.extras, **ended}
    proven: dict[str, Any] = {"phase": Phase.GONE, "teardown": Teardown(record.data["teardown"]), "extras": extras}
    if not state.moves_on or state.stop or state.failure or state.asked_at is None:
        return proven
    if state.asked_at.seconds_until(Moment.of(record)) > MOVES_ON_S:
        failure = {
            "step": str(Step.AWAIT_READY),
            "code": "boot.gone",
            "message": state.moves_on,
            "hint": "Train again.",
        }
        return {**proven, "failure": {**failure, "exit_code": int(ExitCode.NO_OFFER)}}
    nothing: dict[str, Any] = {"token": "", "instance": None, "deadline_wall": None, "moves_on": ""}
    return {**proven, "phase": Phase.OPENED, "passed_over": state.passed_over + 1, **nothing}


def _incident(state: RunState, record: Record) -> dict[str, Any]:
    """What is beside the machine and billed stays open until it is gone; a run closed before has its code then."""
    extras, leftover, dearer = dict(state.extras), dict.fromkeys(state.leftover), state.dearer
    name, token = str(record.data.get("id", "")), str(record.data.get("token", ""))
    if record.data["code"] in ("machine.gone", "machine.back"):
        return {"was_gone": record.data["code"] == "machine.gone"}
    if record.data["code"] == "machine.ends_itself":
        return {"ends_wall": record.data["ends_wall"]}
    if record.data["code"] == "machine.moved" and state.instance is not None:
        moved = Instance.model_validate(record.data["instance"])
        return {"instance": state.instance.model_copy(update={"address": moved.address}), "moved": True}
    if record.data["code"] in ("job.silent", "job.heard"):
        return {"silent_since_wall": number(record.data.get("since_wall"))}
    if record.data["code"] == "boot.gone" and token == state.token:
        return {"moves_on": str(record.data["message"])}
    match record.data["code"]:
        case "create.late" | "create.duplicate" if name:
            extras[name] = Extra(token=token)
        case "create.late_gone" | "create.duplicate_gone" if name in extras:
            extras[name] = extras[name].model_copy(update={"ended": Moment.of(record)})
        case "leftover" if record.data.get("billed"):
            leftover[token] = None
        case "leftover_gone":
            leftover.pop(token, None)
        case "price.rose":
            rate = Micros(record.data["rate_micros_per_hour"])
            dearer = (*dearer, Dearer(micros_per_hour=rate, since_wall=record.data["since_wall"]))
        case _:
            return {}
    changed = {"extras": extras, "leftover": tuple(leftover), "dearer": dearer}
    after = state.model_copy(update=changed)
    is_over = after.phase is Phase.CLOSED and not after.may_be_billing
    return changed | ({"exit_code": int(exit_code_of(after))} if is_over else {})


def _to(phase: Phase) -> Callable[[RunState, Record], dict[str, Any]]:
    return lambda state, record: {"phase": phase}


_EFFECTS: dict[Event, Callable[[RunState, Record], dict[str, Any]]] = {
    Event.RUN_OPENED: _run_opened,
    Event.STAGE_OBSERVED: lambda state, record: {"stage": "done"},
    Event.CREATE_INTENDED: _create_intended,
    Event.CREATE_OBSERVED: _create_observed,
    Event.CREATE_REFUSED: _create_refused,
    Event.CREATE_UNKNOWN: lambda state, record: {"heard_at": Moment.of(record)},
    Event.READY_OBSERVED: _ready_observed,
    Event.SHIP_OBSERVED: _to(Phase.SHIPPED),
    Event.TRAIN_INTENDED: lambda state, record: {
        "start_asked": True,
        "shared": "holds" if state.shared else "",
        "hard_stop_wall": record.data.get("hard_stop_wall"),
        "pushed": record.data.get("pushed", ""),
        "linger_s": record.data.get("linger_s", 0.0),
    },
    Event.TRAIN_STARTED: lambda state, record: {"phase": Phase.TRAINING, "pushed": record.data.get("pushed", "")},
    Event.RATE_OBSERVED: lambda state, record: {"rated": True},
    Event.TRAIN_OBSERVED: _train_observed,
    Event.STOP_REQUESTED: _stop_requested,
    Event.COLLECT_OBSERVED: _collect_observed,
    Event.HOLD_INTENDED: _hold_intended,
    Event.HOLD_OBSERVED: _to(Phase.COLLECTED),
    Event.DESTROY_INTENDED: _to(Phase.DESTROYING),
    Event.DEATH_READ: lambda state, record: {"was_gone": True},
    Event.DEATH_PROVEN: _death_proven,
    Event.SALVAGE_OBSERVED: _salvage_observed,
    Event.STEP_FAILED: _step_failed,
    Event.INCIDENT: _incident,
    Event.RECEIPT_OBSERVED: _to(Phase.SETTLED),
    Event.RUN_CLOSED: lambda state, record: {"phase": Phase.CLOSED, "exit_code": record.data["exit_code"]},
}
