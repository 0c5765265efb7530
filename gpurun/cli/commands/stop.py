"""`gpurun stop`: end a run after saving its work."""

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
    """Save and download a checkpoint, destroy the machine, and write the receipt."""
    from gpurun.cli.run_control import find_meant_run, stop_run

    sight, leaves = find_meant_run(session, run), None
    if sight.plan.job.is_attended:
        from gpurun.cli.dev_session import confirm_stop_of_box
        from gpurun.core.errors import Declined

        leaves, now = confirm_stop_of_box(session, sight), False  # Changes since the last --sync exist only on the box.
        if leaves is False:
            raise Declined("stop.declined", "Nothing was stopped.", hint=f"To log in: gpurun ssh {sight.folder.name}")
    return stop_run(session, sight, "now" if now else "save", "stopped by the user", leaves=leaves is True)
