"""`gpurun plan`: know before you pay. `train` takes its plan from here too."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from gpurun.cli.options import REQUEST, Request
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

if TYPE_CHECKING:
    from gpurun.core.run_plan import Plan

app = typer.Typer(rich_markup_mode=None)


@verb(
    app,
    "plan",
    examples=["gpurun plan gpt2-124m --gpu 8xA100 --max-cost 25", "gpurun plan mini-gpt --json"],
    shares=REQUEST,
)
def plan(session: Session, request: Request) -> Result:
    """Show what a run would take and cost, on every offer, and spend nothing."""
    with run_name(session, "") as run:
        made = plan_run(session, request, run, need_data=False)
    return Result(data=made.model_dump(mode="json"), text=shown(session, made))


@contextmanager
def run_name(session: Session, wanted: str) -> Iterator[str]:
    """The name of a run to come; shards that were prepared for it and did not become its own are gone afterwards.

    So are those of commands that were killed.
    """
    from gpurun.data.abandoned_shards import drop_abandoned
    from gpurun.planning.planner import free_name

    home = session.home.prepare()
    drop_abandoned(home, session.clock)
    if wanted:
        from gpurun.ledger.runs import demand_free

        demand_free(home, wanted)
    run = wanted or free_name(home)
    try:
        yield run
    finally:
        shutil.rmtree(home.staged_data(run), ignore_errors=True)


def plan_run(session: Session, request: Request, run: str, *, need_data: bool) -> Plan:
    """The plan of a request; with `need_data` its shards must be there, or are made."""
    from gpurun.planning.planner import make_plan

    home, say = session.home, session.talk_when_slow()
    return make_plan(request, run=run, home=home, clock=session.clock, say=say, need_data=need_data)


def shown(session: Session, made: Plan) -> str:
    """A plan as text for this terminal."""
    from gpurun.view.plan_screen import plan_text

    return plan_text(made, session.style, now=session.clock.wall())
