"""The results of an audit: a row for each run, the head of the chain, and the problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpurun.core.money import Figure, Micros
from gpurun.core.untrusted import plain_line

Mark = Literal["ok", "bad", "none"]
NO = "does not hold"


@dataclass(frozen=True, slots=True)
class AuditRow:
    """The result for one audited run.

    `chain` is the check of its journal's lines and of its place in the chain of receipts. `files` is how many of the
    downloaded files are present with the right digest. `death` is "proven", "not seen" (a machine was requested and is
    not proven gone), "none" (no machine was made), or for the user's own box "yours to end", "shutdown confirmed" or
    "shutdown stated". `measured_micros` is the cost, which the audit has computed again. `measured_is` is its kind: a
    floor while `may_be_billing`, and if the journal is damaged or does not bound the cost.

    `verdict` is "may be billing" if `may_be_billing`, else "does not hold" if there are problems, else a verdict of
    ledger/log_facts.py, or "none" without a receipt. A row without problems and warnings is sound. `marks` are facts
    that only one run can have: its rented machine, its events. `trainer` is the trainer by the receipt, with the digest
    of a changed one; "" if it states none.
    """

    run: str
    seq: int | None
    chain: Mark
    signature: Mark
    files: str
    death: str
    measured_micros: Micros | None
    verdict: str
    may_be_billing: bool
    measured_is: Figure
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    marks: frozenset[str] = frozenset()
    trainer: str = ""

    @property
    def is_floor(self) -> bool:
        """Return whether more may have been paid than `measured_micros`."""
        return self.measured_is is Figure.FLOOR


def marks_of(predicate: Mapping[str, Any]) -> frozenset[str]:
    """Return facts that only one honest receipt can have: "the rented machine runpod abc", "the events file SHA256".

    Two events files differ because events contain the time of day to the millisecond. Two logs may be equal: that of a
    command may contain no times, and the times in the trainer's are in tenths of a second.
    """
    machine, events = predicate["instance"], predicate["digests"]["events"]
    marks = {f"the events file {events['sha256']}"} if events["bytes"] else set()
    if (
        machine
        and machine["id"]
        and predicate["asked"]["mode"] == "paid"
        and predicate["teardown"]["is"] != "user_operated"
    ):
        marks.add(f"the rented machine {machine['provider']} {machine['id']}")
    return frozenset(marks)


def mark_shared_facts(rows: Sequence[AuditRow]) -> tuple[AuditRow, ...]:
    """Return the rows, with a problem added to each one that shares a mark with another row."""
    owners: dict[str, list[str]] = {}
    for row in rows:
        for mark in row.marks:
            owners.setdefault(mark, []).append(row.run)

    def found(row: AuditRow) -> AuditRow:
        shared = [(mark, [run for run in owners[mark] if run != row.run]) for mark in sorted(row.marks)]
        repeated = tuple(plain_line(f"{mark} is also that of {', '.join(others)}") for mark, others in shared if others)
        verdict = NO if repeated and not row.may_be_billing else row.verdict
        return replace(row, problems=(*row.problems, *repeated), verdict=verdict) if repeated else row

    return tuple(found(row) for row in rows)


@dataclass(frozen=True)
class AuditReport:
    """The rows of an audit, and the results for the chain as a whole.

    `head` is the sha256 of the last receipt. A user who keeps it can check later that no receipt up to this one was
    changed (`expected_head`). `receipts` is the number of all links in the chain, also of runs without a row.
    """

    rows: tuple[AuditRow, ...]
    head: str
    total_micros: Micros
    receipts: int
    problems: tuple[str, ...]

    @property
    def may_be_billing(self) -> bool:
        """Return whether any run may still cost money: then the exit code is 9, whatever else was found."""
        return any(row.may_be_billing for row in self.rows)

    @property
    def sound(self) -> bool:
        """Return whether there are no problems; warnings and unfinished runs do not count."""
        return not self.problems and not any(row.problems for row in self.rows)
