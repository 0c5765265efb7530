"""`gpurun run`: run any command with a cap, a proof of death and a receipt, as for training."""

from __future__ import annotations

from functools import partial
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
    """Rent a machine, run any command on it, download its outputs, and prove that the machine is gone."""
    from gpurun.cli.started_run import ask_to_upload, start_and_follow
    from gpurun.planning.command_proposal import CommandProposal
    from gpurun.planning.planner import make_plan

    _ask_again(session, request, is_asked=not starting.yes)

    def planned(run: str) -> Plan:
        admit = partial(ask_to_upload, session)
        return make_plan(CommandProposal(request, session.desk(run), is_asked=not starting.yes, admit=admit))

    return start_and_follow(session, request, planned, starting, before=partial(build_environment, session))


def _ask_again(session: Session, request: Request, *, is_asked: bool) -> None:
    """Ask whether to repeat a command that succeeded, unless --yes was typed; Declined after a no."""
    from gpurun.core.errors import Declined
    from gpurun.jobs.commands.continued_command import repeated_run

    if not (is_asked and session.interactive) or not (name := repeated_run(request, session.home)):
        return
    question = f"{name} succeeded. Run its command again from its last checkpoint? [y/N]"
    if session.ask(question, flag="--yes").lower() not in ("y", "yes"):
        hint = f"To train for more steps, change the command: gpurun run --from {name} -- COMMAND"
        raise Declined("continue.ended_well", f"{name} had succeeded, so nothing was started.", hint=hint)


def build_environment(session: Session, plan: Plan) -> None:
    """Build the environment of a rehearsal with --pip, and report missing imports."""
    from pathlib import Path

    from gpurun.jobs.commands.rehearsal_venv import build_venv
    from gpurun.jobs.requirements import SETUP_LIMIT_S, distributions

    if not plan.job.python:
        return
    limit_s = plan.choices.setup_limit_s or SETUP_LIMIT_S
    build_venv(Path(plan.job.python), plan.job.pip, limit_s, session.say)
    here = distributions(plan.job.imports, plan.job.python)
    if missing := [name for name in plan.job.imports if name not in here]:
        session.say(f"! Even with the --pip packages, {', '.join(missing)} cannot be imported.")
