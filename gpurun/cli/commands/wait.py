"""`gpurun wait`: wait for a run to end, in a script."""

from __future__ import annotations

import typer

from gpurun.cli.options import UsualRun
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(rich_markup_mode=None)


@verb(app, "wait", examples=["gpurun wait fox-41", "gpurun train --yes --detach && gpurun wait"])
def wait(session: Session, run: UsualRun = None) -> Result:
    """Wait silently until a run ends, and exit with its exit code. Ctrl-C stops only the waiting."""
    from gpurun.cli.run_control import find_meant_run
    from gpurun.cli.waiting import wait_until_over

    return wait_until_over(session, find_meant_run(session, run).folder)
