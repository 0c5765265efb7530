"""`gpurun sweep`: run many trials of a recipe or command on one machine, under one cap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from gpurun.cli.options import STARTING, Starting
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.sweep_options import SWEEP
from gpurun.cli.verb import verb

if TYPE_CHECKING:
    from gpurun.core.run_plan import Plan, Request
else:
    Request = object

app = typer.Typer(rich_markup_mode=None)


@verb(
    app,
    "sweep",
    examples=[
        "gpurun sweep mini-gpt --set lr=1e-3,3e-4 --set model.layers=4,6 --gpu 1xL4 --max-cost 6",
        "gpurun sweep --set lr=1e-4..1e-2 --trials 20 --gpu 1xL4 --max-cost 6 -- python train.py --lr {lr}",
    ],
    shares=[SWEEP, STARTING],
)
def sweep(session: Session, request: Request, starting: Starting) -> Result:
    """Try many settings of a recipe or a command on one machine, and download the best."""
    from functools import partial

    from gpurun.cli.commands.run import build_environment
    from gpurun.cli.started_run import ask_to_upload, start_and_follow
    from gpurun.planning.planner import make_plan
    from gpurun.planning.sweep_proposal import sweep_proposal

    def planned(run: str) -> Plan:
        desk, admit = session.desk(run), partial(ask_to_upload, session)
        return make_plan(sweep_proposal(request, desk, is_asked=not starting.yes, admit=admit))

    return start_and_follow(session, request, planned, starting, before=partial(build_environment, session))
