"""`gpurun budget`: show what is left of each budget, and what was spent."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError

app = typer.Typer(rich_markup_mode=None)


@verb(app, "budget", examples=["gpurun budget", "gpurun budget --month 2026-11 --json"])
def budget(
    session: Session,
    month: Annotated[
        str, typer.Option("--month", metavar="YYYY-MM", help="Show only what was spent in this month.")
    ] = "",
) -> Result:
    """Show what is left of each budget, how much each run holds, and what receipts say was spent."""
    from gpurun.cli.budget_rows import budget_rows
    from gpurun.readers.money_spent import spent_by_month
    from gpurun.view.budget_screen import budget_screen

    if month and not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise UsageError("usage.month", f"--month {month!r} is not a month.", hint="Write --month 2026-11.")
    budgets = budget_rows(session)
    rows, unread = spent_by_month(session.home)
    rows = [spent for spent in rows if spent.month == month or not month]
    data = {
        "budgets": [
            {
                "name": row.name,
                "limit_micros": row.limit_micros,
                "spent_micros": row.spent_micros,
                "held_micros": row.held_micros,
                "left_micros": row.left_micros,
                "held": [{"run": hold.run, "micros": hold.micros, "until_wall": hold.until_wall} for hold in row.holds],
            }
            for row in budgets
        ],
        "spent": [{name: getattr(spent, name) for name in spent.__slots__} for spent in rows],
        "unread": unread,
    }
    lines = budget_screen(budgets, rows, unread, session.style, now=session.clock.wall())
    return Result(data=data, text=session.draw(lines))
