"""`gpurun plan` and `gpurun train`: know before you pay, then pay no more than that."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli import options
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

if TYPE_CHECKING:
    from gpurun.core.plan import Plan, Request


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    planning = ["gpurun plan gpt2-124m --gpu 8xA100 --max-cost 25", "gpurun plan mini-gpt --json"]
    verb(app, "plan", examples=planning, shares=options.REQUEST)(plan)
    training = ["gpurun train --gpu 8xA100 --max-cost 25", "gpurun train mini-gpt --dry-run"]
    verb(app, "train", examples=training, shares=options.REQUEST)(train)


def plan(session: Session, request: Request) -> Result:
    """Show what a run would take and cost, on every offer, and spend nothing."""
    with _name(session, "") as run:
        made = _make_plan(session, request, run, need_data=False)
    return Result(data=made.model_dump(mode="json"), text=_plan_text(session, made))


def train(
    session: Session,
    request: Request,
    yes: options.Yes = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start it and return at once.")] = False,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="The run's name.")] = "",
    on_interrupt: Annotated[str, typer.Option("--on-interrupt", metavar="WHAT", help="ask, detach or stop.")] = "",
) -> Result:
    """Rent, train, bring it home, destroy, prove it, and leave a receipt."""
    from gpurun.cli.interrupts import Interrupts
    from gpurun.cli.viewer import follow, left_running
    from gpurun.core.errors import UsageError
    from gpurun.lifecycle.runs import open_run
    from gpurun.lifecycle.supervisor import start_supervisor

    on_interrupt = on_interrupt or session.settings["on_interrupt"].value
    if on_interrupt not in ("ask", "detach", "stop"):
        raise UsageError("usage.on_interrupt", f"--on-interrupt {on_interrupt!r} is not one of ask, detach, stop.",
                         hint="Leave it out, or choose one of the three.")  # fmt: skip
    with _name(session, name) as run:
        made = _make_plan(session, request, run, need_data=True)
        _show_and_ask(session, made, yes=yes)
        # From here on a signal is an answer to the run: its supervisor would rent, train and pay without this command.
        with Interrupts() as heard:
            folder = open_run(session.home, request, made)
            start_supervisor(folder, session.home, session.clock)
            return left_running(folder) if detach else follow(session, folder, on_interrupt=on_interrupt, heard=heard)


@contextmanager
def _name(session: Session, wanted: str) -> Iterator[str]:
    """The name of a run to come; shards that were prepared for it and did not become its own are gone afterwards.

    So are those of commands that were killed.
    """
    from gpurun.lifecycle.corpus.abandoned import drop_abandoned
    from gpurun.lifecycle.names import free_name

    home = session.home.prepare()
    drop_abandoned(home, session.clock)
    if wanted:
        from gpurun.lifecycle.runs import demand_free

        demand_free(home, wanted)
    run = wanted or free_name(home)
    try:
        yield run
    finally:
        shutil.rmtree(home.staged_data(run), ignore_errors=True)


def _make_plan(session: Session, request: Request, run: str, *, need_data: bool) -> Plan:
    from gpurun.lifecycle.plan import make_plan

    home, say = session.home, session.talk_when_slow()
    return make_plan(request, run=run, home=home, clock=session.clock, say=say, need_data=need_data)


def _show_and_ask(session: Session, plan: Plan, *, yes: bool) -> None:
    """Print the plan; where money can be spent, ask, or want both --yes and a cap."""
    from gpurun.core.errors import Declined, UsageError
    from gpurun.core.money import format_usd

    if not session.json:
        session.say(_plan_text(session, plan))
    if not plan.worst_micros:
        return
    if plan.cap_micros is None:
        raise UsageError("cap.missing", "A run that can spend money needs a cap.", hint="Say it: --max-cost 25.")
    if yes:
        return
    others = f" ({format_usd(plan.most_micros)} if it has to be another offer)" if _may_cost_more(plan) else ""
    question = f"Spend up to {format_usd(plan.worst_micros)}{others}? [y/N]"
    if session.ask(question, flag="--yes").lower() not in ("y", "yes"):
        raise Declined("train.declined", "Nothing was rented and nothing spent.", hint="gpurun plan shows it again.")


def _plan_text(session: Session, plan: Plan) -> str:
    from gpurun.view.plan import plan_text

    return plan_text(plan, session.style, now=session.clock.wall())


def _may_cost_more(plan: Plan) -> bool:
    """Whether another approved offer, taken when the first has no capacity, has a dearer worst case."""
    return plan.most_micros > plan.worst_micros
