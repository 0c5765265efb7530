"""`gpurun attach`: open a live view of a run in any terminal."""

from __future__ import annotations

import typer

from gpurun.cli.options import UsualRun
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(rich_markup_mode=None)


@verb(app, "attach", examples=["gpurun attach", "gpurun attach fox-41"])
def attach(session: Session, run: UsualRun = None) -> Result:
    """Watch a run live; closing the view does not affect the run."""
    from gpurun.cli.interrupts import ATTACHED
    from gpurun.cli.run_control import find_meant_run
    from gpurun.cli.viewer import follow_run

    return follow_run(session, find_meant_run(session, run).folder, on_interrupt=ATTACHED)
