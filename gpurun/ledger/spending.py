"""The cost of a run, for everything that shows money. The receipt uses the same figures.

Only the audit also computes the cost with its own code (ledger/audit/rentals.py), to check it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.core.journal_records import Record
from gpurun.core.money import Figure, Micros, total
from gpurun.ledger.rental import figure_of, rentals_of


@dataclass(frozen=True)
class Spending:
    """The cost of a run, and what kind of figure it is."""

    micros: Micros
    figure: Figure


def spending(records: Sequence[Record], now: float | None = None, *, is_watched: bool = False) -> Spending:
    """Return the cost of a run by its journal until `now` (seconds since the epoch), or until its last record.

    `is_watched` means that a process drives the run, so a machine that has not ended is known to live.
    """
    rentals = rentals_of(records if now is None else records_until(records, now))
    return Spending(total(*(rental.micros for rental in rentals)), figure_of(rentals, is_watched=is_watched))


def spent_by(records: Sequence[Record], now: float) -> Micros:
    """Return only the amount of `spending` until `now`."""
    return spending(records, now).micros


def records_until(records: Sequence[Record], now: float) -> list[Record]:
    """Return the records and an artificial one at `now`: a rental without a recorded end is then paid until `now`."""
    if not records:
        return []
    last = records[-1]
    moment = Record(seq=last.seq + 1, prev="", wall=now, mono=last.mono, boot_id=last.boot_id, event="now", data={})
    return [*records, moment]
