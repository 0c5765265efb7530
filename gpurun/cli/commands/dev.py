"""`gpurun dev`: rent a machine to work on, with a cap, a proof of death and a receipt, as for a run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.dev_options import DEV_BOX
from gpurun.cli.options import STARTING, Starting
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

if TYPE_CHECKING:
    from gpurun.core.run_plan import Plan, Request
    from gpurun.planning.dev_box_proposal import DevBoxWishes

    Wanted = tuple[Request, DevBoxWishes]
else:
    Wanted = tuple

app = typer.Typer(rich_markup_mode=None)


@verb(
    app,
    "dev",
    examples=["gpurun dev --gpu 1xRTX4090 --max-cost 3", "gpurun dev --from fox-41 --max-cost 3 --jupyter"],
    shares=[DEV_BOX, STARTING],
)
def dev(
    session: Session,
    wanted: Wanted,
    starting: Starting,
    no_shell: Annotated[
        bool, typer.Option("--no-shell", help="Print what to type next instead of opening a shell.")
    ] = False,
) -> Result:
    """Rent a machine to work on by shell, editor or JupyterLab; it ends automatically when it is idle."""
    from gpurun.cli.dev_session import work_there
    from gpurun.cli.started_run import ask_to_upload, start_and_follow
    from gpurun.planning.dev_box_proposal import DevBoxProposal
    from gpurun.planning.planner import make_plan

    request, wishes = wanted

    def planned(run: str) -> Plan:
        admit = partial(ask_to_upload, session)
        return make_plan(DevBoxProposal(request, wishes, session.desk(run), is_asked=not starting.yes, admit=admit))

    follow = partial(work_there, session, has_shell=not (no_shell or starting.detach))
    return start_and_follow(session, request, planned, starting, follow=follow)
