"""Builds the rows of the budgets for `budget` and `mandate show`."""

from __future__ import annotations

from contextlib import suppress

from gpurun.cli.session import Session
from gpurun.core.errors import GpurunError
from gpurun.core.money import Micros, left_of, total
from gpurun.ledger.budget import Budget, MonthBudget
from gpurun.ledger.mandate import MandateBudget, file_of, mandates_of, read_mandate
from gpurun.view.budget_screen import BudgetRow, HoldRow


def budget_rows(session: Session) -> list[BudgetRow]:
    """Return the rows of the month and of all mandates; under a mandate, only its own row."""
    month = MonthBudget(session.home, session.clock)
    names = [session.bounds.mandate.id] if session.bounds else [name for name, _ in mandates_of(session.home)]
    return [_make_row(month, month.limit()), *(mandate_row(session, name) for name in names)]


def mandate_row(session: Session, mandate_id: str) -> BudgetRow:
    """Return the row of a mandate, even if it has expired or was revoked."""
    limit: Micros | None = None
    with suppress(GpurunError):
        limit = read_mandate(file_of(session.home, mandate_id), session.home).total_micros
    return _make_row(MandateBudget(session.home, session.clock, mandate_id), limit)


def _make_row(budget: Budget, limit: Micros | None) -> BudgetRow:
    entries = budget.entries()
    still_open = [entry for entry in entries if not entry.is_spent]
    spent = total(*(entry.micros for entry in entries if entry.is_spent))
    held = total(*(entry.micros for entry in still_open))
    return BudgetRow(
        name=budget.name,
        limit_micros=limit,
        spent_micros=spent,
        held_micros=held,
        left_micros=None if limit is None else left_of(limit, total(spent, held)),
        holds=tuple(HoldRow(entry.who, entry.micros, entry.until_wall) for entry in still_open),
    )
