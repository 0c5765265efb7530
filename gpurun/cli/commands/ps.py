"""`gpurun ps`: the runs of this home, as a table."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import ExitCode

app = typer.Typer(rich_markup_mode=None)


@verb(app, "ps", examples=["gpurun ps", "gpurun ps --all --json"])
def ps(
    session: Session,
    all_runs: Annotated[bool, typer.Option("--all", "-a", help="Finished runs too.")] = False,
) -> Result:
    """List the unfinished runs; one that may be billing while nobody drives it stands first.

    Exit 9 when one may be billing and nobody drives it, or its deadline has passed.
    """
    from gpurun.cli.run_status import run_data, run_row, ways_on
    from gpurun.ledger.runs import look_at_all, planned_runs
    from gpurun.view.list_tables import ps_table

    sights, errors = look_at_all(session.home, planned_runs(session.home))
    shown = [sight for sight in sights if all_runs or sight.unfinished]
    now = session.clock.wall()
    rows = [run_row(sight, now) for sight in shown]
    told = [run_data(sight, row) for sight, row in zip(shown, rows, strict=True)]
    billing = any(row.may_be_billing for row in rows)
    text = session.draw(ps_table(rows, session.style, now=now)) if rows else ""
    if not rows and sights:
        text = f"Nothing is running. {len(sights)} finished: gpurun ps --all"
    elif not rows and not errors:
        text = f"No runs in {session.home.root}. Start one: gpurun train --dry-run"
    return Result(
        data={"runs": told},
        text=text,
        after="\n".join(ways_on(shown, now)),
        errors=tuple(errors),
        exit_code=ExitCode.MAY_BE_BILLING if billing else errors[0].exit_code if errors else ExitCode.DONE,
    )
