"""`gpurun plan`: show time and cost before paying. `train` also makes its plan here."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.options import REQUEST, Request
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

if TYPE_CHECKING:
    from gpurun.core.clock import Clock
    from gpurun.core.paths import Home
    from gpurun.core.run_plan import Plan

app = typer.Typer(rich_markup_mode=None)
ABANDONED_S = 86_400.0


@verb(
    app,
    "plan",
    examples=["gpurun plan gpt2-124m --gpu 8xA100 --max-cost 60", "gpurun plan mini-gpt --json"],
    shares=[REQUEST],
)
def plan(
    session: Session,
    request: Request,
    every: Annotated[bool, typer.Option("--all", help="Show every offer, and why it was not chosen.")] = False,
    output: Annotated[
        str, typer.Option("-o", metavar="FILE", help="Write the plan to this file, for gpurun train FILE.")
    ] = "",
) -> Result:
    """Show how long a run would take and what it would cost on each offer. Spends nothing."""
    with run_name(session, "") as run:
        made = plan_run(session, request, run, need_data=False)
    after = ""
    if output:
        from gpurun.cli.render import write_file
        from gpurun.planning.plan_file import plan_file

        write_file(Path(output).expanduser(), plan_file(request, made, session.clock.wall()), flag="-o")
        after = f"Wrote {output}. To get a new quote and start it after a yes: gpurun train {shlex.quote(output)}"
    return Result(data=made.model_dump(mode="json"), text=render_plan(session, made, every=every), after=after)


@contextmanager
def run_name(session: Session, name: str) -> Iterator[str]:
    """Yield the name of a new run: `name`, or a generated name. UsageError if a run has that name already.

    Afterwards, remove the files that were staged for the run but not used. Files that killed commands have staged are
    removed too.
    """
    from gpurun.ledger.run_name import free_name

    home = session.home.prepare()
    _drop_abandoned(home, session.clock)
    if name:
        from gpurun.ledger.runs import demand_free

        demand_free(home, name)
    run = name or free_name(home)
    try:
        yield run
    finally:
        for staged in (home.staged_data(run), home.staged_trainer(run)):
            shutil.rmtree(staged, ignore_errors=True)


def plan_run(session: Session, request: Request, run: str, *, need_data: bool) -> Plan:
    """Make the plan of a request; with `need_data`, also make its shards if they do not exist."""
    from gpurun.planning.planner import make_plan
    from gpurun.planning.trainer_proposal import TrainerProposal

    return make_plan(TrainerProposal(request, session.desk(run)), need_data=need_data)


def render_plan(session: Session, made: Plan, *, every: bool = False) -> str:
    """Return a plan as text for this terminal."""
    from gpurun.view.plan_screen import plan_text

    return plan_text(made, session.style, now=session.clock.wall(), every=every)


def _drop_abandoned(home: Home, clock: Clock) -> None:
    """Remove staged files that are over a day old, unless their command still exists: it may wait for an answer."""
    for staged in home.staged.glob("*.*"):
        with suppress(OSError):  # Another command may be removing the same files.
            if clock.wall() - staged.stat().st_mtime > ABANDONED_S and not _is_alive(staged.suffix[1:]):
                shutil.rmtree(staged)


def _is_alive(pid: str) -> bool:
    """Return whether a process with this id exists; False if `pid` is not a number."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
