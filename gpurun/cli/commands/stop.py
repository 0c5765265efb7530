"""`gpurun stop`: the soft end of a run that is under way."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.options import RunArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(rich_markup_mode=None)


@verb(app, "stop", examples=["gpurun stop fox-41", "gpurun stop @last --now"])
def stop(
    session: Session,
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a checkpoint.")] = False,
) -> Result:
    """Save a checkpoint, download it, destroy the machine, write the receipt."""
    from gpurun.cli.run_control import find_meant_run, stop_run

    return stop_run(session, find_meant_run(session, run), "now" if now else "save", "stopped by the user")
