"""`gpurun stop`, `destroy`, `resume` and `collect`: what a person does to a run that is under way."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.options import RunArgument, Yes
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    verb(app, "stop", examples=["gpurun stop fox-41", "gpurun stop @last --now"])(stop)
    verb(app, "resume", examples=["gpurun resume fox-41", "gpurun resume @last --json"])(resume)
    verb(app, "collect", examples=["gpurun collect fox-41", "gpurun collect @last --only best --to ./best"])(collect)
    verb(app, "destroy", examples=["gpurun destroy fox-41", "gpurun destroy @last --yes"])(destroy)


def stop(
    session: Session,
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a checkpoint.")] = False,
) -> Result:
    """Save a checkpoint, bring it home, destroy the instance, write the receipt."""
    from gpurun.cli.control import find, stop_run

    return stop_run(session, find(session, run), "now" if now else "save", "stopped by the user")


def resume(session: Session, run: RunArgument) -> Result:
    """Finish what the journal says is unfinished: after a crash, sleep or reboot."""
    from gpurun.cli.control import drive, find
    from gpurun.cli.interrupts import RESUMED
    from gpurun.cli.viewer import follow

    sight = find(session, run)
    if not sight.unfinished:
        name = sight.folder.name
        text = f"{name} is finished; its receipt: gpurun receipt {name}"
        if sight.state.outcome != "done" and sight.plan.mode != "rehearsal":
            text += f"\nTo train what it did not come to, in another rental: gpurun train --from {name}"
        return Result(data={"run": name, "state": sight.state.phase}, text=text)
    drive(session, sight)
    return follow(session, sight.folder, on_interrupt=RESUMED)


def collect(
    session: Session,
    run: RunArgument,
    only: Annotated[str, typer.Option("--only", metavar="WHAT", help="last, best, or all that is finished.")] = "all",
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="A folder that gets a copy of it.")] = "",
) -> Result:
    """Bring finished checkpoints home now, while training goes on; of a run that is over, say what came home."""
    from gpurun.cli.collecting import collect_run

    return collect_run(session, run, only=only, to=to)


def destroy(
    session: Session,
    run: RunArgument,
    yes: Yes = False,
    same_account: Annotated[
        bool, typer.Option("--same-account", help="Vouch that a new key is of the account that rented the machine.")
    ] = False,
) -> Result:
    """Destroy the instance now, without collecting anything, and prove that it is gone."""
    from gpurun.cli.control import find, stop_run, sweep_damaged
    from gpurun.core.errors import Declined

    sight = find(session, run)
    question = f"Destroy {sight.folder.name} without bringing anything home? [y/N]"
    if sight.unfinished and not yes and session.ask(question, flag="--yes").lower() not in ("y", "yes"):
        raise Declined("destroy.declined", "Nothing was destroyed.", hint="gpurun stop keeps a checkpoint first.")
    if sight.damage is not None:
        return sweep_damaged(session, sight, same_account=same_account)
    return stop_run(session, sight, "destroy", "destroyed by the user", same_account=same_account)
