"""`gpurun destroy`: end the machine now; its files are lost."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.options import RunArgument, Yes
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(rich_markup_mode=None)


@verb(app, "destroy", examples=["gpurun destroy fox-41", "gpurun destroy @last --yes"])
def destroy(
    session: Session,
    run: RunArgument,
    yes: Yes = False,
    same_account: Annotated[
        bool,
        typer.Option("--same-account", help="State that a new key belongs to the account that rented the machine."),
    ] = False,
) -> Result:
    """Destroy the machine now, without downloading anything, and prove that it is gone."""
    from gpurun.cli.run_control import find_meant_run, stop_run, sweep_damaged
    from gpurun.core.errors import Declined

    sight = find_meant_run(session, run)
    question = f"Destroy {sight.folder.name} without downloading anything? [y/N]"
    if sight.unfinished and not yes and session.ask(question, flag="--yes").lower() not in ("y", "yes"):
        raise Declined("destroy.declined", "Nothing was destroyed.", hint="gpurun stop saves a checkpoint first.")
    if sight.damage is not None:
        return sweep_damaged(session, sight, same_account=same_account)
    return stop_run(session, sight, "destroy", "destroyed by the user", same_account=same_account)
