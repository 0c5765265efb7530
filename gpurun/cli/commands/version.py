"""`gpurun version`: show the versions of gpurun and of Python."""

from __future__ import annotations

import platform

import typer

from gpurun import __version__
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(rich_markup_mode=None)


@verb(app, "version", examples=["gpurun version", "gpurun version --json"])
def version(session: Session) -> Result:
    """Show the versions of gpurun and of Python."""
    data = {
        "gpurun": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    return Result(data=data, text=f"gpurun {__version__} (Python {platform.python_version()})")
