"""Describes a run's status: a short phrase, its row in `ps`, and the next command if the run may be billing."""

from __future__ import annotations

from gpurun.core.clock import local_minute
from gpurun.core.journal_records import Event, Phase, RunState
from gpurun.core.money import Figure, total
from gpurun.core.paths import open_regular
from gpurun.core.trainer_events import parse_event
from gpurun.core.transfer_progress import read_moving
from gpurun.ledger.run_state import waits_for_machine
from gpurun.ledger.runs import Sight, gave_up
from gpurun.ledger.spending import spending
from gpurun.view.list_tables import RunRow
from gpurun.view.number_format import format_duration

_TAIL_BYTES = 1 << 16
# The words that the live view uses for these phases; other phases are shown by their names.
_WORDS = {
    Phase.OPENED: "starting",
    Phase.CREATING: "provisioning",
    Phase.CREATED: "provisioning",
    Phase.READY: "shipping",
    Phase.SHIPPED: "shipping",
    Phase.TRAINING: "running",
    Phase.TRAINED: "collecting",
    Phase.COLLECTED: "collected",
    Phase.GONE: "settling",
    Phase.SETTLED: "settling",
    Phase.CLOSED: "settling",
}


def billing_advice(sight: Sight, now: float) -> str:
    """Return a sentence about a run that may be billing, with the next command."""
    why, name = gave_up(sight, now), sight.folder.name
    if why:
        who = "Its supervisor keeps trying" if sight.owner else "No supervisor drives it"
        known = f"{name}: {why} {who}"
    else:
        known = f"{name} is past its deadline; its supervisor runs" if sight.owner else f"No supervisor drives {name}"
    return f"{known}: gpurun resume {name}, or gpurun destroy {name}"


def run_row(sight: Sight, now: float) -> RunRow:
    """Return a run's row of `ps` for users."""
    state, plan = sight.state, sight.plan
    ends_wall = _ends_wall(sight)
    is_overdue = ends_wall is not None and now > ends_wall
    # It is red if no supervisor drives it, a supervisor gave up without proof, or its deadline has passed.
    is_red = state.may_be_billing and (sight.owner is None or is_overdue or bool(gave_up(sight)))
    spent = spending(sight.records, now, is_watched=sight.owner is not None and not is_red)
    is_floor = sight.damage is not None  # The lost records of a damaged journal may contain more costs.
    dies = state.may_be_billing and not (
        state.late or state.leftover
    )  # Late machines and leftovers do not have this deadline.
    return RunRow(
        run=sight.folder.name,
        recipe=plan.job.recipe,
        where=_describe_machine(sight, now),
        state=state_word(sight) + _describe_silence(sight, now),
        step=_last_step(sight),
        steps=plan.job.steps or None,
        started_wall=sight.opened_wall or None,
        spent_micros=spent.micros,
        worst_micros=total(plan.leg.spent_micros, plan.worst_micros) if plan.leg else plan.worst_micros,
        dies_wall=(state.ends_wall or ends_wall) if dies and not _is_queued(sight) else None,
        dies_by=_describe_death(sight) if dies else "",
        live=sight.owner is not None,
        may_be_billing=is_red,
        spent_is=Figure.FLOOR if is_floor else spent.figure,
    )


def _describe_machine(sight: Sight, now: float) -> str:
    """Return the run's machine. If the run waits for its next machine, return the best price seen during the wait."""
    offer, state = sight.plan.offer, sight.state
    leg = f"leg {state.leg} · " if state.leg > 1 else ""
    if waits_for_machine(state):
        progress = read_moving(sight.folder, now)
        price = progress.words.rpartition("; ")[2] if progress is not None and progress.what == "wait" else ""
        return f"{leg}no machine{f' · {price}' if price else ''}"
    return f"{leg}{offer.provider} {offer.label}{' spot' if leg and offer.spot else ''}"


def _describe_silence(sight: Sight, now: float) -> str:
    """Return a phrase with the time since the job's last output, if that is long; else ""."""
    since_wall = sight.state.silent_since_wall
    if since_wall is None or not sight.unfinished or sight.state.phase is not Phase.TRAINING:
        return ""
    return f", silent {format_duration(max(0.0, now - since_wall))}"


def _ends_wall(sight: Sight) -> float | None:
    """Return the deadline of the run's machine; for a cluster's job that has started, the deadline from its start."""
    state = sight.state
    if state.deadline_wall is None:
        return None
    started_wall = state.instance.started_wall if state.instance is not None else None
    return sight.plan.lease.ends_wall(state.deadline_wall, started_wall)


def _is_queued(sight: Sight) -> bool:
    """Return whether the run's job may still be in the queue. Its lease begins only when the job starts."""
    instance = sight.state.instance
    return bool(sight.plan.lease.queue_s) and (instance is None or instance.started_wall is None)


def _describe_death(sight: Sight) -> str:
    """Return what ends the machine. A guard that is armed at boot counts only once the machine has confirmed it."""
    if _is_queued(sight):
        return f"{format_duration(sight.plan.lease.total_s)} after its start"
    planned = sight.plan.offer.dies_by_itself
    is_armed = sight.state.armed or sight.plan.lease.queue_s  # A scheduler itself ends the jobs that it starts.
    is_waited_for = planned.startswith("yes") and sight.plan.offer.rate_micros_per_hour and not is_armed
    return "not armed yet" if is_waited_for else planned.partition(",")[0]


def state_word(sight: Sight) -> str:
    """Return the status of a run in a few words."""
    state = sight.state
    if sight.damage is not None or sight.plan_lost is not None:
        return "damaged"
    if gave_up(sight):
        return "not proven gone"
    if sight.unfinished:
        word = held_word(state) if state.phase is Phase.HELD else _WORDS.get(state.phase, str(state.phase))
        word = "waiting, $0.00/h" if waits_for_machine(state) else word
        word = "queued" if state.phase is Phase.CREATED and _is_queued(sight) else word
        return word if sight.owner else f"{word}, no supervisor"
    begun = any(record.event is Event.TRAIN_STARTED for record in sight.records)
    nothing = "cut off" if begun else "never started"
    return "failed" if state.failure or state.outcome in ("failed", "lost") else state.outcome or nothing


def held_word(state: RunState) -> str:
    """Return a phrase with the time until which a machine is held, because ending it would destroy files."""
    until_wall = state.hold_until_wall or 0.0
    return f"held until {local_minute(until_wall, now=until_wall)}"


def run_data(sight: Sight, row: RunRow) -> dict[str, object]:
    """Return the facts of the same row as data for programs."""
    state = sight.state
    return {
        "run": sight.folder.name,
        "recipe": sight.plan.job.recipe,
        "provider": sight.plan.offer.provider,
        **({"leg": state.leg, "is_waiting": waits_for_machine(state)} if state.legs else {}),
        "phase": state.phase,
        "step": row.step,
        "steps": row.steps,
        "spent_micros": row.spent_micros,
        "spent_is": row.spent_is,
        "spent_is_floor": row.spent_is is Figure.FLOOR,
        "worst_micros": row.worst_micros,
        "outcome": state.outcome,
        "silent_since_wall": state.silent_since_wall,
        "owner": sight.owner,
        "may_be_billing": row.may_be_billing,
        "deadline_wall": state.deadline_wall,
        "held_until_wall": state.hold_until_wall if state.phase is Phase.HELD else None,
        "exit_code": state.exit_code,
        "damage": sight.damage or (sight.plan_lost.what if sight.plan_lost else None),
    }


def _last_step(sight: Sight) -> int | None:
    """Return the step of the latest event with a step. Only the end of the file is read."""
    try:
        with open_regular(sight.folder.events) as events:
            events.seek(max(0, sight.folder.events.stat().st_size - _TAIL_BYTES))
            lines = events.read().splitlines()
    except OSError:
        return None
    parsed = (parse_event(line) for line in reversed(lines))
    return next((event.step for event in parsed if event is not None and event.step is not None), None)
