"""What the verbs that act on a run share: find it, wish for something, make sure that somebody drives it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode, GpurunError, MayBeBilling, SetupError, VerificationFailed

if TYPE_CHECKING:
    from gpurun.lifecycle.control import How
    from gpurun.lifecycle.runs import Sight


def find(session: Session, run: str) -> Sight:
    """The run that was meant, as it stands."""
    from gpurun.lifecycle.runs import find_run, look

    return look(session.home, find_run(session.home, run))


def drive(session: Session, sight: Sight) -> None:
    """Make sure that an unfinished run has a supervisor; a damaged journal is not driven, only swept by its tag."""
    from gpurun.lifecycle.supervisor import start_supervisor

    if sight.damage is not None:
        raise VerificationFailed(
            "journal.damaged",
            f"The journal of {sight.folder.name} is damaged: {sight.damage}.",
            hint=f"Nothing is spent on it any more. End what it may have left: gpurun destroy {sight.folder.name}.",
        )
    if sight.unfinished:
        start_supervisor(sight.folder, session.home, session.clock)


def stop_run(session: Session, sight: Sight, how: How, reason: str, *, same_account: bool = False) -> Result:
    """Wish for a stop and watch until the run is closed; a closed run is only described."""
    from gpurun.cli.viewer import follow
    from gpurun.lifecycle.control import wish

    if not sight.unfinished:
        return Result(
            data={"run": sight.folder.name, "state": sight.state.phase},
            text=f"{sight.folder.name} is closed already; its receipt: gpurun receipt {sight.folder.name}",
        )
    try:
        wish(sight.folder, how, by="user", reason=reason, same_account=same_account)
    except SetupError as unwritten:
        if how != "destroy" or not sight.state.may_be_billing:
            raise
        return _destroy_unwritten(session, sight, unwritten)
    drive(session, sight)
    result = follow(session, sight.folder, stream=False)
    # For the run it was an interruption; for whoever asked for it, it is what was asked for.
    return replace(result, exit_code=ExitCode.DONE) if result.exit_code is ExitCode.INTERRUPTED else result


def _destroy_unwritten(session: Session, sight: Sight, unwritten: SetupError) -> Result:
    """Destroy what a run has without a supervisor, for want of a place to write the wish; its receipt waits for one."""
    from gpurun.lifecycle.supervisor import end_at_once

    run = sight.folder.name
    try:
        end_at_once(session.home, run, session.clock)
    except MayBeBilling:
        raise
    except GpurunError as error:
        hint = f"{error.hint} Then: gpurun destroy {run}"
        raise MayBeBilling("destroy.cannot_look", error.what, hint=hint) from error
    told = SetupError(
        unwritten.code,
        f"The machine is gone, but nothing of it could be written down: {unwritten.what}",
        hint=f"Make room or give yourself access; then the proof and the receipt come with: gpurun destroy {run}",
    )
    data = {"run": run, "destroyed": [sight.state.token]}
    return Result(data=data, text=f"Destroyed (proven): {sight.state.token}", errors=(told,), exit_code=told.exit_code)


def sweep_damaged(session: Session, sight: Sight, *, same_account: bool = False) -> Result:
    """End what a run with a damaged journal may have left, by its tokens, with proof, and without writing to it.

    Every provider of the plan is asked, since the damage may hide which one made the machine. One that shows nothing to
    another account's key has not said that there is nothing.
    """
    from gpurun.lifecycle.instance.account import demand_account
    from gpurun.lifecycle.reap import sweep_run
    from gpurun.providers.base import Unknown
    from gpurun.providers.registry import open_provider

    run, ended, left = sight.folder.name, list[str](), list[MayBeBilling]()
    names = dict.fromkeys(one.offer.provider for one in sight.approved)
    for name in names:
        try:
            provider = open_provider(name, session.home, session.clock, sight.plan.choices)
            gone = sweep_run(provider, sight.folder, session.clock)
            ended += gone
            if not gone and sight.state.may_be_billing and sight.state.provider == name:
                demand_account(provider, sight.state, same_account=same_account)
        except MayBeBilling as error:
            left.append(error)
        except (Unknown, GpurunError) as error:
            why = error.what if isinstance(error, GpurunError) else str(error)
            hint = f"Try again: gpurun destroy {run}"
            left.append(MayBeBilling("destroy.cannot_look", f"{name} does not say what exists: {why}.", hint=hint))
    if left:
        return Result(errors=tuple(left), exit_code=ExitCode.MAY_BE_BILLING)
    asked = ", ".join(names)
    text = f"Destroyed (proven): {', '.join(ended)}" if ended else f"Nothing at {asked} was asked for by {run}."
    return Result(data={"run": run, "destroyed": ended}, text=text)
