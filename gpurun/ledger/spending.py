"""What a run costs, by one reckoning: whatever shows money shows this, and its receipt is made of the same rentals.

Only the audit reckons a second time, with code of its own (ledger/audit/rentals.py), to check it.
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
    """Return what a run costs by its journal until `now`, or else until its last record.

    `is_watched`: somebody is at work on it, so that its machine is known to live.
    """
    rentals = rentals_of(records if now is None else records_until(records, now))
    return Spending(total(*(rental.micros for rental in rentals)), figure_of(rentals, is_watched=is_watched))


def spent_by(records: Sequence[Record], now: float) -> Micros:
    """Return the amount alone, as the live view draws it."""
    return spending(records, now).micros


def records_until(records: Sequence[Record], now: float) -> list[Record]:
    """Return the records, and one of this moment, up to which all is paid whose end is not on record."""
    if not records:
        return []
    last = records[-1]
    moment = Record(seq=last.seq + 1, prev="", wall=now, mono=last.mono, boot_id=last.boot_id, event="now", data={})
    return [*records, moment]
