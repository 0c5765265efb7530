"""What an audit found of each run, with its bill, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpurun.core.money import format_usd, total, usd
from gpurun.ledger import audit as ledger
from gpurun.ledger.audit.findings import NO
from gpurun.lifecycle.charges import Bill
from gpurun.view.audit_table import AuditRow, AuditSummary

if TYPE_CHECKING:
    from gpurun.readers.replay import Replayed

MORE_MICROS = usd("0.01")
"""How much more than a receipt's bound may be billed, since bills are rounded in their own way."""


def with_bill(row: ledger.AuditRow, bill: Bill | None, alive: Callable[[], Sequence[str]] = tuple) -> ledger.AuditRow:
    """The row with what its bill contradicts; a floor is no bound. Then `alive` tells which of its machines live."""
    billed, bound = bill.micros if bill is not None else None, row.measured_micros
    if billed is None or bound is None or row.is_floor or billed <= total(bound, MORE_MICROS):
        return row
    told = f"{format_usd(billed)} was billed, and the receipt says {format_usd(bound)} at most"
    if living := alive():
        told = f"{told}; {', '.join(living)} lives: gpurun reap puts that on record and ends it"
        return replace(row, problems=(*row.problems, told), verdict="may be billing", may_be_billing=True)
    return replace(row, problems=(*row.problems, told), verdict=row.verdict if row.may_be_billing else NO)


def with_replay(row: ledger.AuditRow, replayed: Replayed | None, *, is_required: bool = False) -> ledger.AuditRow:
    """Return the row with what a replay contradicts, and as warnings what it could not check.

    Where a replay `is_required`, a run of which nothing was computed again has a problem.
    """
    if replayed is None:
        return row
    none = ("nothing of its training was computed again",) if is_required and not replayed.was_replayed else ()
    problems = (*replayed.problems, *none)
    verdict = NO if problems and not row.may_be_billing else row.verdict
    warnings = (*row.warnings, *replayed.unchecked)
    return replace(row, problems=(*row.problems, *problems), warnings=warnings, verdict=verdict)


def bill_notes(bill: Bill) -> list[str]:
    """What a figure of a bill does not say by itself."""
    early = ["the bill is not settled yet"] if bill.micros is not None and not bill.is_settled else []
    return [*early, *bill.unclear]


def audit_row(row: ledger.AuditRow, lost: list[str], bill: Bill | None) -> AuditRow:
    """The row of a run in the table; `lost` are those that may be billing while nobody drives them."""
    level = "bad" if row.problems or row.run in lost else "warn" if row.warnings else "ok"
    word = NO.upper() if row.problems else "running" if row.may_be_billing else row.verdict
    return AuditRow(
        run=row.run,
        chain=row.chain,
        signature=row.signature,
        files=row.files,
        death=row.death,
        verdict=f"MAY BE BILLING → gpurun resume {row.run}" if row.run in lost else word,
        level=level,  # type: ignore[arg-type]
        measured_micros=row.measured_micros,
        measured_is=row.measured_is,
        billed_micros=bill.micros if bill is not None else None,
    )


def audit_summary(report: ledger.AuditReport) -> AuditSummary:
    """The lines below the table: the chain, and the receipts that it spans."""
    seqs = [row.seq for row in report.rows if row.seq is not None]
    return AuditSummary(
        receipts=report.receipts,
        problems=len(report.problems),
        unbroken=not report.problems and all(row.chain != "bad" for row in report.rows),
        seq=(min(seqs), max(seqs)) if seqs else None,
        head=report.head if report.receipts else "",
    )


def audit_data(report: ledger.AuditReport, bills: Mapping[str, Bill]) -> dict[str, object]:
    """The whole report for programs."""
    nothing = Bill(None, is_settled=False)
    rows = [
        {
            "run": row.run,
            "seq": row.seq,
            "chain": row.chain,
            "signature": row.signature,
            "files": row.files,
            "death": row.death,
            "measured_micros": row.measured_micros,
            "measured_is": row.measured_is,
            "measured_is_floor": row.is_floor,
            "billed_micros": bills.get(row.run, nothing).micros,
            "billed_is_settled": bills.get(row.run, nothing).is_settled,
            "billed_unclear": list(bills.get(row.run, nothing).unclear),
            "verdict": row.verdict,
            "may_be_billing": row.may_be_billing,
            "problems": list(row.problems),
            "warnings": list(row.warnings),
            "trainer": row.trainer,
        }
        for row in report.rows
    ]
    return {
        "ok": report.sound,
        "rows": rows,
        "head": report.head,
        "receipts": report.receipts,
        "total_micros": report.total_micros,
        "problems": list(report.problems),
    }
