"""`gpurun report`: several runs laid over one another."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.options import Runs
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "report", examples=["gpurun report @last", "gpurun report fox-41 owl-7 --html report.html"])(report)


def report(
    session: Session,
    runs: Runs,
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="Write one self-contained page there.")] = "",
) -> Result:
    """Compare runs: loss by step, token, second and dollar, their settings, and the same prompts side by side."""
    from gpurun.cli.reports import report_runs

    return report_runs(session, runs, html=html)
