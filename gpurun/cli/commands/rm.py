"""`gpurun rm`: delete the large files of finished runs."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.options import complete_run
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError

app = typer.Typer(rich_markup_mode=None)

Runs = Annotated[list[str], typer.Argument(metavar="RUN", help="The runs to clean up.", autocompletion=complete_run)]


@verb(app, "rm", examples=["gpurun rm fox-41", "gpurun rm fox-41 elk-42 --with-checkpoints"])
def rm(
    session: Session,
    runs: Runs,
    with_checkpoints: Annotated[
        bool, typer.Option("--with-checkpoints", help="Delete checkpoints even if no other copy is known.")
    ] = False,
) -> Result:
    """Delete the downloaded files of finished runs; journal, receipt, log and curves stay.

    Refuses a run that is not proven gone, or that an unfinished run continues from.
    """
    from gpurun.ledger.runs import find_run
    from gpurun.lifecycle.artifacts.removal import removal_of, remove
    from gpurun.view.number_format import format_bytes, format_files

    names = list(dict.fromkeys(find_run(session.home, run) for run in runs))
    removals = [removal_of(session.home, name) for name in names]  # Check all runs before deleting anything.
    for removal in removals:
        if removal.checkpoints and not with_checkpoints:
            _confirm(session, removal.folder.name, len(removal.checkpoints), removal.bucket)
    lines = []
    for removal in removals:
        name = removal.folder.name
        if removal.is_nothing:
            lines.append(f"{name}: there is nothing to remove.")
            continue
        remove(removal, session.clock.wall())
        lines.append(f"{name}: {format_bytes(removal.bytes)} freed, {format_files(removal.files)}.")
    rows = [{"run": row.folder.name, "files": row.files, "bytes": row.bytes} for row in removals]
    return Result(data={"removed": rows}, text="\n".join(lines))


def _confirm(session: Session, name: str, count: int, bucket: str) -> None:
    """Ask the user to type the run's name before checkpoints are deleted; UsageError for anything else."""
    where = f"the run uploaded a copy to {bucket}" if bucket else "gpurun knows of no other copy"
    question = f"{name} has {count} checkpoint files, and {where}. Type its name to remove them:"
    if session.ask(question, flag="--with-checkpoints") != name:
        what = f"You did not type {name}, so nothing was removed."
        raise UsageError("rm.not_confirmed", what, hint=f"To keep a copy: gpurun collect {name} --to DIR")
