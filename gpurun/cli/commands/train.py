"""`gpurun train`: pay no more than was planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.options import REQUEST, Request, Yes
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import Declined, UsageError

if TYPE_CHECKING:
    from gpurun.core.run_plan import Plan

app = typer.Typer(rich_markup_mode=None)


@verb(
    app,
    "train",
    examples=["gpurun train --gpu 8xA100 --max-cost 25", "gpurun train mini-gpt --dry-run"],
    shares=REQUEST,
)
def train(
    session: Session,
    request: Request,
    yes: Yes = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the machine is ready.")] = False,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="The run's name.")] = "",
    on_interrupt: Annotated[str, typer.Option("--on-interrupt", metavar="WHAT", help="ask, detach or stop.")] = "",
) -> Result:
    """Rent a machine, train, download the checkpoints, prove the machine gone."""
    from gpurun.cli.commands.plan import plan_run, run_name
    from gpurun.cli.interrupts import Interrupts
    from gpurun.cli.viewer import follow
    from gpurun.cli.waiting import wait_until_ready
    from gpurun.ledger.runs import open_run
    from gpurun.lifecycle.supervisor import start_supervisor

    on_interrupt = on_interrupt or session.settings["on_interrupt"].value
    if on_interrupt not in ("ask", "detach", "stop"):
        raise UsageError("usage.on_interrupt", f"--on-interrupt {on_interrupt!r} is not one of ask, detach, stop.",
                         hint="Leave the flag out, or choose one of the three.")  # fmt: skip
    with run_name(session, name) as run:
        made = plan_run(session, request, run, need_data=True)
        _show_and_ask(session, made, yes=yes)
        _rehearse_changed(session, request, made)
        # From here on a signal is an answer to the run: its supervisor would rent, train and pay without this command.
        with Interrupts() as heard:
            folder = open_run(session.home, request, made)
            start_supervisor(folder, session.home, session.clock)
            if detach:
                return wait_until_ready(session, folder, on_interrupt, heard)
            return follow(session, folder, on_interrupt=on_interrupt, heard=heard)


def _rehearse_changed(session: Session, request: Request, plan: Plan) -> None:
    """Rehearse the copy of a changed trainer here before it trains on paid time; TrainingFailed where it does not."""
    from gpurun.core.run_plan import Mode
    from gpurun.planning.upload_list import CHANGED

    if plan.mode is not Mode.PAID or plan.trainer != CHANGED:
        return
    from gpurun.cli.recipe_checks import own_home, rehearsed

    session.say("The changed trainer is rehearsed on this machine first.")
    with own_home(session.home) as home:
        rehearsed(session, request, home, str(session.home.staged_trainer(plan.run)))


def _show_and_ask(session: Session, plan: Plan, *, yes: bool) -> None:
    """Print the plan; where money can be spent, ask, or want both --yes and a cap."""
    from gpurun.cli.commands.plan import shown
    from gpurun.core.money import format_usd

    if not session.json:
        session.say(shown(session, plan))
    if not plan.worst_micros:
        return
    if plan.cap_micros is None:
        raise UsageError("cap.missing", "A run that can spend money needs a cap.", hint="Give one: --max-cost 25.")
    if yes:
        return
    this, most = format_usd(plan.worst_micros), format_usd(plan.most_micros)
    others = f" ({most} if it has to be another offer)" if most != this else ""
    question = f"Spend up to {this}{others}? [y/N]"
    if session.ask(question, flag="--yes").lower() not in ("y", "yes"):
        raise Declined("train.declined", "Nothing was rented and nothing spent.", hint="gpurun plan shows it again.")
