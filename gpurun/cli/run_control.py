"""Provides the steps that commands on a run share: find it, request its end, ensure that it has a supervisor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.clock import machine_id, ticks
from gpurun.core.errors import Declined, ExitCode, GpurunError, MayBeBilling, RunHeld, SetupError, VerificationFailed
from gpurun.core.journal_records import Phase, opened_of

if TYPE_CHECKING:
    from gpurun.core.stop_request import How
    from gpurun.ledger.runs import Sight

ANSWER_S = 20.0
"""Seconds in which a supervisor must begin to end the run; after that, the command destroys the machine itself."""


def resolve_run_name(session: Session, run: str | None) -> str:
    """Return the name of the run that `run` refers to; if it is None, choose the usual run and print its name."""
    from gpurun.ledger.runs import find_run, usual_run

    if run is not None:
        name = find_run(session.home, run)
    else:
        name, why = usual_run(session.home)
        session.say(f"{name}, {why}")
    if session.bounds:
        session.bounds.require_own(name)
    return name


def find_meant_run(session: Session, run: str | None) -> Sight:
    """Return the current state of the run that `run` refers to; see `resolve_run_name`."""
    from gpurun.ledger.runs import look_at_run

    return look_at_run(session.home, resolve_run_name(session, run))


def confirm_resume_here(session: Session, sight: Sight) -> None:
    """Ask before resuming a run that another computer started, because its supervisor may still run there.

    Declined after a no.
    """
    opened = opened_of(sight.records).machine if sight.records else ""
    if not opened or opened == machine_id() or sight.owner is not None:
        return
    name = sight.folder.name
    question = f"{name} was started on another computer, which may still be driving it. Resume it here? [y/N]"
    if session.ask(question, flag="--here").lower() not in ("y", "yes"):
        raise Declined(
            "resume.declined", "Nothing was done.", hint=f"gpurun resume {name} --here resumes it without asking."
        )


def log_in_again(session: Session, sight: Sight) -> None:
    """Let a box or cluster ask the user for a login, because a supervisor cannot answer; a failure is only printed."""
    from gpurun.core.cluster import NoAnswer
    from gpurun.planning.own_box import open_way

    if session.interactive:
        try:
            open_way(sight.plan, session.home, session.clock)
        except GpurunError as error:
            session.say(error.what)
        except NoAnswer as error:
            session.say(str(error))


def ensure_supervisor(session: Session, sight: Sight, *, to_its_end: bool = False) -> None:
    """Ensure that an unfinished run has a supervisor; with `to_its_end`, also a run that must only be ended.

    Otherwise raise the error of `_refusal_of_supervisor`, as MayBeBilling if the run may be billing. A run with a
    damaged journal can never have a supervisor.
    """
    from gpurun.lifecycle.supervisor import start_supervisor

    error = _refusal_of_supervisor(sight, to_its_end=to_its_end) if sight.owner is None else None
    if error is not None and sight.state.may_be_billing:
        raise MayBeBilling(error.code, error.what, hint=error.hint)
    if error is not None:
        raise error
    if sight.unfinished:
        start_supervisor(sight.folder, session.home, session.clock)
        if sight.plan.choices.log_to:
            from gpurun.readers.curve_log import start_logging

            start_logging(sight.folder, session.home, sight.plan.choices.log_to)


def _refusal_of_supervisor(sight: Sight, *, to_its_end: bool) -> VerificationFailed | None:
    """Return the error that says why the run must not have a supervisor; None if it may have one."""
    from gpurun.ledger.journal import newer_error

    name, state = sight.folder.name, sight.state
    if sight.damage is not None:
        hint = f"gpurun spends nothing more on it. To end machines that it may have left: gpurun destroy {name}"
        return VerificationFailed("journal.damaged", f"The journal of {name} is damaged: {sight.damage}.", hint=hint)
    if to_its_end or not sight.unfinished:
        return None
    return newer_error(name, state.newer) if state.newer and state.phase is Phase.OPENED else sight.plan_lost


def stop_run(
    session: Session, sight: Sight, how: How, reason: str, *, same_account: bool = False, leaves: bool = False
) -> Result:
    """Request a stop and watch the run until it ends; for a run that has ended, only say so.

    With `leaves`, the user has agreed to lose the files that are not downloaded.
    """
    from gpurun.cli.viewer import follow_run
    from gpurun.core.stop_request import ask_to_stop

    if not sight.unfinished:
        return Result(
            data={"run": sight.folder.name, "state": sight.state.phase},
            text=f"{sight.folder.name} has already ended; its receipt: gpurun receipt {sight.folder.name}",
        )
    try:
        ask_to_stop(sight.folder, how, by="user", reason=reason, same_account=same_account, leaves=leaves)
    except SetupError as unwritten:
        if how != "destroy" or not sight.state.may_be_billing:
            raise
        what = f"The machine is gone, but its end could not be recorded: {unwritten.what}"
        hint = "Free some space or fix the permissions; then, for the proof and the receipt: "
        error = SetupError(unwritten.code, what, hint=f"{hint}gpurun destroy {sight.folder.name}")
        return _destroy_unrecorded(session, sight, error)
    ensure_supervisor(session, sight, to_its_end=True)
    ends_at_once = how == "destroy" or sight.state.phase in (Phase.CREATED, Phase.READY)
    if ends_at_once and not _is_begun(session, sight):
        run = sight.folder.name
        what = f"The supervisor of {run} ({sight.owner or 'started just now'}) did not respond for {ANSWER_S:.0f} s."
        hint = f"Kill it (kill -9); then, for the proof and the receipt: gpurun resume {run}"
        return _destroy_unrecorded(session, sight, RunHeld("supervisor.silent", what, hint=hint))
    result = follow_run(session, sight.folder, stream=False)
    # The user requested the interruption, so this is a success.
    return replace(result, exit_code=ExitCode.DONE) if result.exit_code is ExitCode.INTERRUPTED else result


def _is_begun(session: Session, sight: Sight) -> bool:
    """Return whether the supervisor begins to destroy the machine within ANSWER_S seconds.

    Also True while the machine is being created, and if nothing may be billed.
    """
    from gpurun.ledger.run_state import WORKING
    from gpurun.ledger.runs import look_at_run

    for _ in ticks(session.clock, 0.2, ANSWER_S):
        state = look_at_run(session.home, sight.folder.name).state
        if not state.may_be_billing or state.phase is Phase.CREATING or state.phase not in WORKING:
            return True
    return False


def _destroy_unrecorded(session: Session, sight: Sight, why: GpurunError) -> Result:
    """Destroy a run's machine from this process; `why` is the error that says why there is no receipt yet."""
    from gpurun.lifecycle.supervisor import end_at_once

    run = sight.folder.name
    try:
        end_at_once(session.home, run, session.clock)
    except MayBeBilling:
        raise
    except GpurunError as error:
        hint = f"{error.hint} Then: gpurun destroy {run}"
        raise MayBeBilling("destroy.cannot_look", error.what, hint=hint) from error
    data = {"run": run, "destroyed": [sight.state.token]}
    return Result(data=data, text=f"Destroyed (proven): {sight.state.token}", errors=(why,), exit_code=why.exit_code)


def sweep_damaged(session: Session, sight: Sight, *, same_account: bool = False) -> Result:
    """Find and end the machines of a run with a damaged journal by their tokens, without writing to the journal.

    Each provider of the plan is checked, because the damage may hide which provider made the machine. If the key
    belongs to another account, an empty list does not prove that nothing is left.
    """
    from gpurun.lifecycle.instance.terminate import require_account
    from gpurun.lifecycle.reaper import sweep_run
    from gpurun.planning.own_box import login_to
    from gpurun.providers.base import Unknown
    from gpurun.providers.registry import open_provider

    run, ended, left = sight.folder.name, list[str](), list[MayBeBilling]()
    choices, last = sight.plan.choices, sight.state.attempts.get(sight.state.token)
    offers = [candidate.offer for candidate in sight.approved]
    names = dict.fromkeys(choices.opened_as(offer.provider, offer.region) for offer in offers)
    used = choices.opened_as(last.provider, last.region) if last is not None else sight.state.provider
    for name in names:
        try:
            provider = open_provider(name, session.home, session.clock, choices, login=login_to)
            gone = sweep_run(provider, sight.folder, session.clock)
            ended += gone
            if not gone and sight.state.may_be_billing and used == name:
                require_account(provider, sight.state, same_account=same_account)
        except MayBeBilling as error:
            left.append(error)
        except (Unknown, GpurunError) as error:
            why = error.what if isinstance(error, GpurunError) else str(error)
            hint = f"Try again: gpurun destroy {run}"
            left.append(MayBeBilling("destroy.cannot_look", f"{name} did not list its machines: {why}.", hint=hint))
    if left:
        return Result(errors=tuple(left), exit_code=ExitCode.MAY_BE_BILLING)
    text = f"Destroyed (proven): {', '.join(ended)}" if ended else f"{run} has nothing at {', '.join(names)}."
    return Result(data={"run": run, "destroyed": ended}, text=text)
