"""Sums what was spent according to this home's receipts, by month, provider and job."""

from __future__ import annotations

from dataclasses import dataclass

from gpurun.core.errors import GpurunError
from gpurun.core.money import Micros, total
from gpurun.core.paths import Home
from gpurun.ledger.write_receipt import read_receipt


@dataclass(frozen=True, slots=True)
class MonthRow:
    """The upper bound of one month's cost, for one job and one provider; months are in UTC."""

    month: str
    provider: str
    recipe: str
    runs: int
    micros: Micros


def spent_by_month(home: Home) -> tuple[list[MonthRow], list[str]]:
    """Return the rows, newest month first, and the names of the runs whose receipt has no readable cost."""
    costs: dict[tuple[str, str, str], list[Micros]] = {}
    unread: list[str] = []
    for folder in home.folders():
        if not folder.receipt.is_file():
            continue
        try:
            predicate = read_receipt(home, folder).predicate
            month = str(predicate["timeline"]["asked"] or "")[:7] or "unknown"
            key = (month, str(predicate["asked"]["provider"]), str(predicate["asked"]["recipe"]))
            bound = predicate["cost"]["upper_bound_micros"]
        except (GpurunError, KeyError, TypeError, ValueError):
            bound = None
        if bound is None:
            unread.append(folder.name)
        else:
            costs.setdefault(key, []).append(Micros(bound))
    rows = [MonthRow(*key, runs=len(paid), micros=total(*paid)) for key, paid in costs.items()]
    return sorted(rows, key=lambda row: (row.month, row.micros), reverse=True), unread
