"""Shows a plan, asks, starts the run and follows it, for `train`, `run`, `dev` and `sweep`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import Declined, UsageError

if TYPE_CHECKING:
    from gpurun.cli.interrupts import Interrupts
    from gpurun.cli.options import Starting
    from gpurun.core.paths import RunFolder
    from gpurun.core.run_plan import Plan, Request


def start_and_follow(
    session: Session,
    request: Request,
    planned: Callable[[str], Plan],
    starting: Starting,
    *,
    before: Callable[[Plan], None] = lambda _: None,
    follow: Callable[[RunFolder, str, Interrupts], Result] | None = None,
) -> Result:
    """Plan a run, ask, call `before` with the plan, start the supervisor, and follow the run until it ends.

    `follow` replaces the usual view; it gets the run's folder, the value of --on-interrupt, and the signals so far.
    """
    from gpurun.cli.commands.plan import run_name
    from gpurun.cli.interrupts import Interrupts as Heard
    from gpurun.cli.viewer import follow_run
    from gpurun.cli.waiting import wait_until_ready
    from gpurun.ledger.mandate import budgets_of
    from gpurun.ledger.runs import create_run
    from gpurun.lifecycle.supervisor import start_supervisor

    on_interrupt = starting.on_interrupt or session.settings["on_interrupt"].value
    if on_interrupt not in ("ask", "detach", "stop"):
        raise UsageError("usage.on_interrupt", f"--on-interrupt {on_interrupt!r} is not one of ask, detach, stop.",
                         hint="Leave the flag out, or choose one of the three.")  # fmt: skip
    if session.bounds:
        from gpurun.cli.mandate_door import refuse_notices

        refuse_notices(session.bounds, starting.notify, starting.program)
    _hand_to_supervisor({"notify.url": starting.notify, "notify.exec": starting.program})
    with run_name(session, starting.name) as run:
        made = planned(run)
        _show_and_ask(session, made, yes=starting.yes)
        before(made)
        # From here on the supervisor spends money, so a signal must be handled and not only end this process.
        with Heard() as heard:
            with budgets_of(session.home, session.clock, made.mandate).reserved(run, made.most_micros):
                folder = create_run(session.home, request, made)
                start_supervisor(folder, session.home, session.clock)
            if made.choices.log_to:
                from gpurun.readers.curve_log import start_logging

                session.say(start_logging(folder, session.home, made.choices.log_to))
            if starting.no_wait:
                return _started_result(made)
            if follow is not None:
                return follow(folder, on_interrupt, heard)
            if starting.detach:
                return wait_until_ready(session, folder, on_interrupt, heard)
            return follow_run(session, folder, on_interrupt=on_interrupt, heard=heard)


def _started_result(plan: Plan) -> Result:
    """Return the result for a run that was started, with its maximum cost."""
    offer = plan.offer
    data = {
        "run": plan.run,
        "mode": plan.mode,
        "provider": offer.provider,
        "gpu": offer.label,
        "rate_micros_per_hour": offer.rate_micros_per_hour,
        "worst_micros": plan.worst_micros,
        "cap_micros": plan.cap_micros,
    }
    return Result(data=data, text=f"{plan.run} has started.", after=f"To watch it: gpurun attach {plan.run}")


def _hand_to_supervisor(variables: Mapping[str, str]) -> None:
    """Pass --notify and --exec to the supervisor in the environment, so that they are not in any file of the run."""
    from gpurun.core.settings import check_setting, variable_of

    for key, value in variables.items():
        if value:
            os.environ[variable_of(key)] = check_setting(key, value, "command line").value


def _show_and_ask(session: Session, plan: Plan, *, yes: bool) -> None:
    """Print the plan; if it can spend money, require a cap, and ask unless --yes is set."""
    from gpurun.cli.commands.plan import render_plan
    from gpurun.core.money import format_usd

    if not session.json:
        session.say(render_plan(session, plan))
    _ask_about_this_machine(session, plan, yes=yes)
    if not plan.worst_micros:
        return
    if plan.cap_micros is None:
        raise UsageError("cap.missing", "A run that can spend money needs a cap.", hint="Set a cap: --max-cost 25.")
    if yes:
        return
    this, most = format_usd(plan.worst_micros), format_usd(plan.most_micros)
    others = f" ({most} if another offer is needed)" if most != this else ""
    question = f"Spend up to {this}{others}? [y/N]"
    if plan.choices.keep_going:
        legs = f"{this} on the first machine, the rest on at most {plan.choices.legs - 1} more"
        question = f"Spend up to {format_usd(plan.cap_micros)} ({legs})? [y/N]"
    if session.ask(question, flag="--yes").lower() not in ("y", "yes"):
        raise Declined("train.declined", "Nothing was rented or spent.", hint="To see the plan again: gpurun plan.")


def _ask_about_this_machine(session: Session, plan: Plan, *, yes: bool) -> None:
    """Ask before running --setup or building packages on this computer."""
    from pathlib import Path

    from gpurun.core.run_plan import Mode
    from gpurun.jobs.commands.rehearsal_venv import is_built

    works = []
    if plan.choices.setup:
        works.append("the script of --setup")
    if plan.job.python and not is_built(Path(plan.job.python)):
        works.append(f"the installation of {', '.join(plan.job.pip)}")
    if yes or plan.mode is Mode.PAID or not works:
        return
    question = f"Run {' and '.join(works)} on this machine? [y/N]"
    if session.ask(question, flag="--yes").lower() not in ("y", "yes"):
        raise Declined("train.declined", "Nothing was installed or started.", hint="Leave --setup and --pip out.")


def ask_to_upload(session: Session, name: str) -> bool | None:
    """Ask whether to upload a file that is named like a key but has no key in it; None if the user cannot be asked."""
    if not session.interactive:
        return None
    question = f"Upload {name}? Its name suggests a key, but its content does not look like one. [y/N]"
    return session.ask(question, flag=f"--include {name}").lower() in ("y", "yes")
