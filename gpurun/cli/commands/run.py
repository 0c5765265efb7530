"""`gpurun run`: any script under the same cap, proof and receipt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from gpurun.cli.command_options import COMMAND
from gpurun.cli.options import STARTING, Starting
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

if TYPE_CHECKING:
    from gpurun.core.run_plan import Plan, Request
else:
    Request = object

app = typer.Typer(rich_markup_mode=None)


@verb(
    app,
    "run",
    examples=["gpurun run --gpu 1xT4 --max-cost 2 train.py", "gpurun run --dry-run --upload . -- bash speedrun.sh"],
    shares=[COMMAND, STARTING],
    takes_command=True,
)
def run(session: Session, request: Request, starting: Starting) -> Result:
    """Rent a machine, run any command on it, download its outputs, prove the machine gone."""
    from gpurun.cli.started_run import start_and_follow
    from gpurun.planning.command_plan import make_command_plan

    def planned(run: str) -> Plan:
        return make_command_plan(request, run=run, home=session.home, clock=session.clock, say=session.talk_when_slow())

    return start_and_follow(session, request, planned, starting)
