"""What a run costs, computed in one place: everything that shows money uses it, as does the receipt.

Only the audit computes it a second time, with its own code (ledger/audit/rentals.py), to check it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.core.journal_records import Record
from gpurun.core.money import Figure, Micros, total
from gpurun.ledger.rental import figure_of, rentals_of


@dataclass(frozen=True)
class Spending:
    """What a run has cost, and what kind of figure that is."""

    micros: Micros
    figure: Figure


def spending(records: Sequence[Record], now: float | None = None, *, is_watched: bool = False) -> Spending:
    """Return what a run costs by its journal until `now`, or until its last record.

    `is_watched`: a process drives the run, so its machine is known to live.
    """
    rentals = rentals_of(records if now is None else records_until(records, now))
    return Spending(total(*(rental.micros for rental in rentals)), figure_of(rentals, is_watched=is_watched))


def spent_by(records: Sequence[Record], now: float) -> Micros:
    """Return only the amount, for the live view."""
    return spending(records, now).micros


def records_until(records: Sequence[Record], now: float) -> list[Record]:
    """Return the records and one of this moment, so that what has no recorded end is paid for until now."""
    if not records:
        return []
    last = records[-1]
    moment = Record(seq=last.seq + 1, prev="", wall=now, mono=last.mono, boot_id=last.boot_id, event="now", data={})
    return [*records, moment]
