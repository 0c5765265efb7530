"""`gpurun collect`: download finished checkpoints while training continues."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.options import RunArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError

app = typer.Typer(rich_markup_mode=None)


@verb(app, "collect", examples=["gpurun collect fox-41", "gpurun collect @last --only best --to ./best"])
def collect(
    session: Session,
    run: RunArgument,
    only: Annotated[str, typer.Option("--only", metavar="WHAT", help="Download last, best, or all.")] = "all",
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="Copy the downloaded files into this folder.")] = "",
) -> Result:
    """Download finished checkpoints while training continues, or list those of a finished run."""
    from gpurun.cli.collect_checkpoints import copy_result_files, download_checkpoints, parse_only
    from gpurun.cli.run_control import find_meant_run

    selection = parse_only(only)
    place = Path(to).expanduser().absolute() if to else None
    if place and place.exists() and not place.is_dir():
        raise UsageError(
            "usage.to", f"{place} is not a folder.", hint="Name a folder with --to; it is created if it does not exist."
        )
    sight = find_meant_run(session, run)
    if place and session.bounds:
        session.bounds.require_below_root("--to", [place])
    result = download_checkpoints(session, sight, selection)
    return copy_result_files(result, sight, place) if place else result
