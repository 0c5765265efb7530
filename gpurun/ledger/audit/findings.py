"""What an audit finds: a row for each run, the chain's head, and the problems."""

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
    """One audited run.

    `chain`: its journal's chain and its place among the receipts. `files`: how many of the collected files are here
    with the right digest. `death`: "proven", "not seen" (something was requested and is not proven gone), "none"
    (nothing was made), or for the user's own box "yours to end", "shutdown confirmed" or "shutdown stated".
    `measured_micros` is the cost that gpurun shows everywhere and the audit has computed again; `measured_is` is its
    kind: a floor while `may_be_billing`, and if the journal does not bound it or is damaged.

    `verdict` is a word of ledger/log_facts.py or "none" (no receipt); but "does not hold" if there are problems, and
    before all else "may be billing". A row without problems and warnings is sound. `marks` are what no other run can
    have, too: its rented machine, its events. `trainer` is what its receipt calls the trainer, with the digest of a
    changed one; else "".
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
        """Return whether more may have been paid."""
        return self.measured_is is Figure.FLOOR


def marks_of(predicate: Mapping[str, Any]) -> frozenset[str]:
    """Return what only one honest receipt can have: "the rented machine runpod abc", "the events file SHA256".

    Events have the time of day to the millisecond. The log is not a mark, because two honest logs may be the same: a
    command's may have no times, and the trainer's are tenths of a second.
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
    """Return the rows, with a problem where two receipts have what only one can have: a rental, or events."""
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
    """All rows, and what concerns the chain as a whole.

    `head` is the sha256 of the last receipt: whoever keeps a copy of it can check later that nothing up to there was
    changed (`expected_head`). `receipts` counts the chain's links, whichever rows were selected.
    """

    rows: tuple[AuditRow, ...]
    head: str
    total_micros: Micros
    receipts: int
    problems: tuple[str, ...]

    @property
    def may_be_billing(self) -> bool:
        """Return whether any run may still cost money: exit 9, before everything else."""
        return any(row.may_be_billing for row in self.rows)

    @property
    def sound(self) -> bool:
        """Return whether nothing is wrong; warnings and unfinished runs do not count."""
        return not self.problems and not any(row.problems for row in self.rows)
