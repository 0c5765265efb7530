"""`gpurun resume`: resume a run that a crash, sleep or reboot left unfinished."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.options import NAMED, USUAL, complete_run
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(rich_markup_mode=None)


@verb(app, "resume", examples=["gpurun resume", "gpurun resume fox-41 --json"])
def resume(
    session: Session,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help=f"{NAMED} (default: the one without a supervisor, or {USUAL}).",
            autocompletion=complete_run,
        ),
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Resume here a run that another computer started.")] = False,
) -> Result:
    """Resume an unfinished run after a crash, sleep or reboot."""
    from gpurun.cli.interrupts import RESUMED
    from gpurun.cli.run_control import confirm_resume_here, ensure_supervisor, find_meant_run, log_in_again
    from gpurun.cli.viewer import follow_run
    from gpurun.ledger.runs import left_alone

    if run is None and (run := left_alone(session.home)):
        session.say(f"{run}, the only unfinished run without a supervisor")
    sight = find_meant_run(session, run)
    if not sight.unfinished:
        name = sight.folder.name
        text = f"{name} is finished; its receipt: gpurun receipt {name}"
        if sight.state.outcome != "done" and sight.plan.mode != "rehearsal":
            again = f"gpurun {sight.plan.job.terms.verb} --from {name}"
            text += f"\nTo do the remaining work in a new rental: {again}"
        return Result(data={"run": name, "state": sight.state.phase}, text=text)
    if sight.state.imported:
        from gpurun.readers.imported_run import finish_import

        finish_import(session.home, sight.folder, session.clock)
        return Result(data={"run": sight.folder.name}, text=f"{sight.folder.name} now has its receipt.")
    if not here:
        confirm_resume_here(session, sight)
    log_in_again(session, sight)
    ensure_supervisor(session, sight)
    return follow_run(session, sight.folder, on_interrupt=RESUMED)
