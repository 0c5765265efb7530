"""`gpurun confirm-shutdown`: a box of your own is yours to end; this checks that you have, and signs it."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.options import RunArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    examples = ["gpurun confirm-shutdown fox-41", 'gpurun confirm-shutdown @last --force "stopped it in the console"']
    verb(app, "confirm-shutdown", examples=examples)(confirm_shutdown)


def confirm_shutdown(
    session: Session,
    run: RunArgument,
    force: Annotated[
        str | None, typer.Option("--force", metavar="WORDS", help="State it yourself; the words are signed.")
    ] = None,
) -> Result:
    """Check that your own box no longer answers after a run, and sign that beside the receipt."""
    from gpurun.cli.confirm import confirm

    return confirm(session, run, force)
