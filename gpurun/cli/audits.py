"""Audits: what was paid, and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode, MayBeBilling, UsageError, VerificationFailed
from gpurun.core.money import format_usd, total, usd
from gpurun.ledger import audit as ledger
from gpurun.ledger.lock import holder_of
from gpurun.lifecycle.bill import Bill, bill_of
from gpurun.lifecycle.runs import find_run
from gpurun.view.audits import AuditRow, AuditSummary, audit_screen
from gpurun.view.paint import render

MORE_MICROS = usd("0.01")
"""How much more than a receipt's bound may be billed, since bills are rounded in their own way."""


def run_audit(
    session: Session,
    runs: list[str],
    *,
    since: str,
    strict: bool,
    head: str | None,
    key: str,
    against_bill: bool = False,
) -> Result:
    """Audit runs: exit 0 when all holds, 10 when something does not, 9 when something may be billing.

    With `against_bill` the providers are asked what they billed, and more than a receipt's bound is a problem.
    """
    names = [find_run(session.home, run) for run in runs] or None
    # Asked before, too: who was driven when its journal was read may have ended well since, which may be minutes ago.
    driven = {run for run in session.home.run_names() if _is_driven(session, run)}
    report = ledger.audit(session.home, names, since=_day(since), expected_head=head, public_key=_key(key))
    bills = _bills(session, report) if against_bill else {}
    report = replace(report, rows=tuple(_billed(row, bills.get(row.run)) for row in report.rows))
    problems = [*report.problems, *(problem for row in report.rows for problem in row.problems)]
    warnings = [warning for row in report.rows for warning in row.warnings]
    failed = bool(problems or (strict and warnings))
    code = ExitCode.VERIFICATION_FAILED if failed else ExitCode.DONE
    lost = [
        row.run
        for row in report.rows
        if row.may_be_billing and row.run not in driven and not _is_driven(session, row.run)
    ]
    code = ExitCode.MAY_BE_BILLING if lost else code
    summary = AuditSummary(
        receipts=report.receipts,
        problems=len(report.problems),
        unbroken=not report.problems and all(row.chain != "bad" for row in report.rows),
        seq=_span(report),
        head=report.head if report.receipts else "",
    )
    lines = audit_screen(
        [_row(row, lost, bills.get(row.run)) for row in report.rows], summary, session.style, exit_code=int(code)
    )
    said = [f"  {row.run}: {text}" for row in report.rows for text in (*row.problems, *row.warnings)]
    said += [f"  {run}: {text}" for run, bill in bills.items() for text in _words(bill)]
    text = "\n".join([render(lines, session.style), *said, *(f"  {problem}" for problem in report.problems)])
    return Result(data=_as_data(report, bills), text=text, errors=_errors(lost, failed), exit_code=code)


def _bills(session: Session, report: ledger.AuditReport) -> dict[str, Bill]:
    """What was billed for each run that rented something."""
    from gpurun.providers.registry import open_provider

    opened = cache(partial(open_provider, home=session.home, clock=session.clock))
    found = {row.run: bill_of(session.home.run(row.run), opened) for row in report.rows if row.measured_micros}
    return {run: bill for run, bill in found.items() if bill is not None}


def _billed(row: ledger.AuditRow, bill: Bill | None) -> ledger.AuditRow:
    """The row with what its bill contradicts; a floor is no bound."""
    billed, bound = bill.micros if bill is not None else None, row.measured_micros
    if billed is None or bound is None or row.is_floor or billed <= total(bound, MORE_MICROS):
        return row
    told = f"{format_usd(billed)} was billed, and the receipt says {format_usd(bound)} at most"
    return replace(row, problems=(*row.problems, told))


def _words(bill: Bill) -> list[str]:
    """What a figure of a bill does not say by itself."""
    early = ["the bill is not settled yet"] if bill.micros is not None and not bill.is_settled else []
    return [*early, *bill.unclear]


def _is_driven(session: Session, run: str) -> bool:
    """Whether a supervisor here owns the run: then it is running, and nothing is lost."""
    return holder_of(session.home.run(run).lock) is not None


def _row(row: ledger.AuditRow, lost: list[str], bill: Bill | None) -> AuditRow:
    level = "bad" if row.problems or row.run in lost else "warn" if row.warnings else "ok"
    running = "running" if row.may_be_billing else row.verdict
    return AuditRow(
        run=row.run,
        chain=row.chain,
        signature=row.signature,
        files=row.files,
        death=row.death,
        verdict=f"MAY BE BILLING → gpurun resume {row.run}" if row.run in lost else running,
        level=level,  # type: ignore[arg-type]
        measured_micros=row.measured_micros,
        measured_is_floor=row.is_floor,
        billed_micros=bill.micros if bill is not None else None,
    )


def _span(report: ledger.AuditReport) -> tuple[int, int] | None:
    seqs = [row.seq for row in report.rows if row.seq is not None]
    return (min(seqs), max(seqs)) if seqs else None


def _as_data(report: ledger.AuditReport, bills: Mapping[str, Bill]) -> dict[str, object]:
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
            "measured_is_floor": row.is_floor,
            "billed_micros": bills.get(row.run, nothing).micros,
            "billed_is_settled": bills.get(row.run, nothing).is_settled,
            "billed_unclear": list(bills.get(row.run, nothing).unclear),
            "verdict": row.verdict,
            "may_be_billing": row.may_be_billing,
            "problems": list(row.problems),
            "warnings": list(row.warnings),
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


def _errors(lost: list[str], failed: bool) -> tuple[VerificationFailed | MayBeBilling, ...]:
    """The one sentence for the envelope; the table has told people already."""
    if lost:
        hint = f"gpurun resume {lost[0]} finishes it; gpurun destroy {lost[0]} ends it at once."
        return (
            MayBeBilling("audit.may_be_billing", f"{lost[0]} is not proven gone, and nobody drives it.", hint=hint),
        )
    if failed:
        hint = "Each is told above; a receipt that was lost can be put back from a copy."
        return (VerificationFailed("audit.failed", "Something recorded does not hold.", hint=hint),)
    return ()


def _day(text: str) -> float | None:
    """The beginning of a local day; empty means since ever."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError("usage.since", f"--since {text!r} is not a date.", hint="Write --since 2026-11-01.") from None


def _key(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        hint = "Name the .pub file of whoever signed."
        raise UsageError("usage.key", f"{path} cannot be read: {error.strerror}.", hint=hint) from None
