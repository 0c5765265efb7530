"""The audit: checks all receipts and journals of a home, from the files alone.

The audit has its own code to parse a journal, check its order, compute digests, and compute seconds, money and ends.
All other figures in a receipt are compared with those that gpurun derives from the run folder now. docs/RECEIPTS.md
says what the audit proves.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from gpurun.core.errors import UsageError
from gpurun.core.money import total
from gpurun.core.paths import RUN_NAME, Home, RunFolder, read_regular
from gpurun.core.untrusted import finding, parse_object, plain_line
from gpurun.ledger.audit.audit_run import audit_run
from gpurun.ledger.audit.findings import AuditReport, AuditRow, mark_shared_facts
from gpurun.ledger.audit.strict_lines import GENESIS, Json, chain_lines, journal_lines
from gpurun.ledger.signing import parse_public_key, payload_of, public_keys

__all__ = ["AuditReport", "AuditRow", "audit"]

_HEAD = re.compile("[0-9a-f]{64}")


def audit(
    home: Home,
    runs: Iterable[str] | None = None,
    *,
    since: float | None = None,
    expected_head: str | None = None,
    public_key: bytes | None = None,
) -> AuditReport:
    """Audit the runs of a home: all, only `runs`, or those opened at or after `since` (seconds since the epoch).

    All lines of the chain are checked in any case. `expected_head` is a head that the user kept from an earlier audit:
    it must be in the chain, and then the receipts of runs that were not selected must also match the chain. An
    incomplete head is a UsageError. With `public_key` (PEM), only this key is trusted, and everything that it has not
    signed is a problem; otherwise every `*.pub` in the home is trusted, and unsigned files are only warnings.
    """
    kept = None if expected_head is None else _parse_head(expected_head)
    keys = public_keys(home.keys) if public_key is None else _parse_trusted_key(public_key)
    selected = None if runs is None else set(runs)

    def judged(names: Iterable[str], place: Mapping[str, Json]) -> Iterator[AuditRow]:
        """Yield a row for each selected run; only one journal is in memory at a time. `place` has the links by run."""
        for folder in [home.run(name) for name in names if selected is None or name in selected]:
            lines = journal_lines(folder.journal)
            # If the journal does not show when the run was opened, the run is audited.
            if since is None or not lines.records or lines.records[0].wall >= since:
                yield audit_run(folder, place, keys, lines, must_be_signed=public_key is not None)

    # This may take minutes. The chain is read again after it, because a run that ended meanwhile has a receipt now.
    unchained = list(judged(_list_unchained_runs(home, chain_lines(home.ledger)[0]), {}))
    links, problems = chain_lines(home.ledger)
    place = {str(link["run"]): link for link in links}
    rows = [*judged(_list_chained_runs(links), place), *(row for row in unchained if row.run not in place)]
    found = list(problems)
    found += [
        f"the chain names a run {name!r}, which cannot be a name" for name in place if not RUN_NAME.fullmatch(name)
    ]
    if kept is not None and kept not in {GENESIS, *(link["receipt_sha256"] for link in links)}:
        found.append(f"the head {kept[:12]}… is not in the chain: receipts were removed or rewritten")
    if kept is not None:  # The head covers an earlier receipt only if each receipt names the one before it.
        seen = {row.run for row in rows}
        found += [
            problem
            for name, link in place.items()
            if name not in seen
            for problem in _check_unselected_receipt(home, link)
        ]
    return AuditReport(
        rows=mark_shared_facts(rows),
        head=str(links[-1]["receipt_sha256"]) if links else GENESIS,
        total_micros=total(*(row.measured_micros for row in rows if row.measured_micros is not None)),
        receipts=len(links),
        problems=tuple(plain_line(problem) for problem in found),
    )


def _check_unselected_receipt(home: Home, link: Json) -> Iterator[str]:
    """Yield the problem if the receipt of a run that was not selected is missing or does not match its link."""
    name, place = str(link["run"]), ("run", "seq", "prev")
    if not RUN_NAME.fullmatch(name):
        return
    faults: list[str] = []
    with finding(faults.append, "it cannot be read"):
        if not home.run(name).receipt.exists():
            yield f"receipt #{link['seq']} ({name}) is missing"
            return
        content = read_regular(home.run(name).receipt)
        predicate = parse_object(payload_of(parse_object(content)))["predicate"]
        is_named = {key: predicate[key] for key in place} == {key: link[key] for key in place}
        if is_named and hashlib.sha256(content).hexdigest() == link["receipt_sha256"]:
            return
    yield ": ".join([f"receipt #{link['seq']} ({name}) is not the one in the chain", *faults])


def _parse_head(written: str) -> str:
    """Return a typed head in lower case; UsageError if it is not complete, because many heads could begin like it."""
    head = written.strip().lower()
    if not _HEAD.fullmatch(head):
        raise UsageError(
            "audit.bad_head",
            f"--head {written!r} is not a complete head, which has 64 hexadecimal digits.",
            hint="Copy everything that `gpurun audit` printed after the word head.",
        )
    return head


def _parse_trusted_key(pem: bytes) -> dict[str, Ed25519PublicKey]:
    try:
        return parse_public_key(pem)
    except ValueError as error:
        raise UsageError(
            "audit.bad_key",
            f"That is not an ed25519 public key in PEM: {error}.",
            hint="Give the file keys/ed25519.pub of the home that signed the receipts.",
        ) from error


def _list_chained_runs(links: Iterable[Json]) -> list[str]:
    """Return the names of the runs in the chain, in its order and without repeats."""
    return [name for name in dict.fromkeys(str(link["run"]) for link in links) if RUN_NAME.fullmatch(name)]


def _list_unchained_runs(home: Home, links: Iterable[Json]) -> list[str]:
    """Return the names of the runs that have a journal but no receipt in the chain, sorted."""
    if not home.runs.is_dir():
        return []
    chained = {str(link["run"]) for link in links}
    names = sorted(path.name for path in home.runs.iterdir() if RUN_NAME.fullmatch(path.name))
    return [name for name in names if name not in chained and _has_journal(home.run(name))]


def _has_journal(folder: RunFolder) -> bool:
    """Return whether a run has a journal; True for an unreadable folder, so that the audit reports it."""
    try:
        return folder.journal.exists()
    except PermissionError:
        return True
