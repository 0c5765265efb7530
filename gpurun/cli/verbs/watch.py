"""`gpurun ps`, `gpurun attach` and `gpurun logs`: readers of run folders."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.options import RunArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    verb(app, "ps", examples=["gpurun ps", "gpurun ps --all --json"])(ps)
    verb(app, "attach", examples=["gpurun attach fox-41", "gpurun attach @last"])(attach)
    verb(app, "logs", examples=["gpurun logs fox-41", "gpurun logs @last -f"])(logs)


def ps(
    session: Session,
    all_runs: Annotated[bool, typer.Option("--all", "-a", help="Finished runs too.")] = False,
) -> Result:
    """List the unfinished runs; one that may be billing while nobody drives it stands first."""
    from gpurun.cli.listing import list_runs

    return list_runs(session, all_runs=all_runs)


def attach(session: Session, run: RunArgument) -> Result:
    """Watch a run live; closing the view changes nothing."""
    from gpurun.cli.control import find
    from gpurun.cli.interrupts import ATTACHED
    from gpurun.cli.viewer import follow

    return follow(session, find(session, run).folder, on_interrupt=ATTACHED)


def logs(
    session: Session,
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Byte for byte; not to a terminal.")] = False,
) -> Result:
    """Print the trainer's log; it works after the instance is gone."""
    from gpurun.cli.control import find
    from gpurun.cli.listing import print_log

    return print_log(session, find(session, run), follow=follow, raw=raw)
