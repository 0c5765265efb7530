"""`gpurun ps`: list the runs of this home in a table."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.durations import day_wall
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import ExitCode, GpurunError

app = typer.Typer(rich_markup_mode=None)


@verb(app, "ps", examples=["gpurun ps", "gpurun ps --all --since 2026-11-01"])
def ps(
    session: Session,
    all_runs: Annotated[bool, typer.Option("--all", "-a", help="Also show finished runs.")] = False,
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="NAME", help="Show only runs of this recipe or script.")
    ] = "",
    since: Annotated[
        str, typer.Option("--since", metavar="DATE", help="Show only runs that started on this day or later.")
    ] = "",
) -> Result:
    """List unfinished runs; runs that may be billing without a supervisor come first.

    Exit 9 if a run may be billing and has no supervisor, or is past its deadline.
    """
    from gpurun.ledger.runs import ends_soon, look_at_all, planned_runs
    from gpurun.readers.run_status import billing_advice, run_data, run_row
    from gpurun.view.list_tables import RunRow, ps_table

    now, home, since_wall = session.clock.wall(), session.home, day_wall(since) or 0.0
    rows: list[RunRow] = []
    records: list[object] = []
    ways: list[str] = []
    errors: list[GpurunError] = []
    finished = 0
    for sight, error in look_at_all(home, planned_runs(home, only_open=not all_runs)):
        if error and not session.bounds:
            errors.append(error)
        if sight and session.bounds and sight.plan.mandate != session.bounds.mandate.id:
            continue
        if sight and (all_runs or sight.unfinished):
            row = run_row(sight, now)
            if not row.may_be_billing and (row.recipe != (recipe or row.recipe) or sight.opened_wall < since_wall):
                continue  # Always show a run that may cost money.
            rows.append(row)
            records.append(run_data(sight, row))
            if row.may_be_billing:
                ways.append(billing_advice(sight, now))
            elif words := ends_soon(sight.state, sight.plan, now):
                ways.append(words)
        finished += sight is not None and not sight.unfinished
    billing = any(row.may_be_billing for row in rows)
    text = session.draw(ps_table(rows, session.style, now=now)) if rows else ""
    if not rows:
        finished += sum(folder.is_closed for folder in home.folders())
    if not rows and (recipe or since):
        text = "No run matches that recipe and date."
    elif not rows and finished:
        text = f"Nothing is running. {finished} finished: gpurun ps --all"
    elif not rows and not errors:
        text = f"No runs in {home.root}. Start one: gpurun train --dry-run"
    return Result(
        data={"runs": records},
        text=text,
        after="\n".join(ways),
        errors=tuple(errors),
        exit_code=ExitCode.MAY_BE_BILLING if billing else errors[0].exit_code if errors else ExitCode.DONE,
    )
