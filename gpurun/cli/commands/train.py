"""`gpurun train`: rent a machine and train under the cap."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer

from gpurun.cli.options import REQUEST, STARTING, Request, Starting
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

if TYPE_CHECKING:
    from gpurun.core.run_plan import Plan

app = typer.Typer(rich_markup_mode=None)


@verb(
    app,
    "train",
    examples=["gpurun train --gpu 8xA100 --max-cost 25", "gpurun train mini-gpt --dry-run"],
    shares=[REQUEST, STARTING],
)
def train(session: Session, request: Request, starting: Starting) -> Result:
    """Rent a machine, train, download the checkpoints, and prove that the machine is gone."""
    from gpurun.cli.commands.plan import plan_run
    from gpurun.cli.started_run import start_and_follow

    def planned(run: str) -> Plan:
        return plan_run(session, request, run, need_data=True)

    return start_and_follow(session, request, planned, starting, before=partial(_rehearse_changed, session, request))


def _rehearse_changed(session: Session, request: Request, plan: Plan) -> None:
    """Rehearse a modified trainer on this computer before a paid run; TrainingFailed if the rehearsal fails."""
    from gpurun.core.run_plan import Mode
    from gpurun.jobs.trainer import CHANGED

    if plan.mode is not Mode.PAID or plan.job.trainer != CHANGED:
        return
    from gpurun.cli.recipe_checks import own_home, rehearse_request

    session.say("Rehearsing your modified trainer on this computer first.")
    with own_home(session.home) as home:
        rehearse_request(session, request, home, str(session.home.staged_trainer(plan.run)))
