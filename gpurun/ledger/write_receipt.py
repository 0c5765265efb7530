"""Writes a run's receipt and adds it to the chain; if the process is killed in between, the next call finishes it.

The receipt is written first, and its link in the chain second. If the process is killed before the link is written, the
run has no place in the chain: the next call makes the receipt again, for the next free place. Once the link is written,
the place is fixed: a receipt that is lost is made again from the run folder, and must have the same digest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from typing import cast

from pydantic import TypeAdapter, ValidationError

from gpurun.core.crashpoint import crashpoint
from gpurun.core.errors import SetupError, UsageError, VerificationFailed
from gpurun.core.paths import Home, RunFolder, read_regular, write_atomic
from gpurun.core.receipt_record import Receipt, Statement
from gpurun.core.records import canonical
from gpurun.core.untrusted import parse_object
from gpurun.ledger.chain import Link, append_link, chain_locked, read_chain
from gpurun.ledger.fsync import unwritable_error
from gpurun.ledger.journal import JournalDamaged, read_journal
from gpurun.ledger.signing import Signer, load_signer, make_envelope, payload_of, public_keys, verify
from gpurun.ledger.statement import basis_of, build_statement


@dataclass(frozen=True)
class WrittenReceipt:
    """A receipt that is on disk and in the chain."""

    seq: int
    sha256: str
    signed: bool


def write_receipt(home: Home, folder: RunFolder) -> WrittenReceipt:
    """Write and sign the receipt of a run, and add it to the chain; a repeated call changes nothing.

    Without a readable key the receipt is unsigned, and states that. Raise JournalDamaged for a damaged journal,
    SetupError if the disk refuses, and VerificationFailed if the receipt that the chain names is lost and can no longer
    be made from the run folder.
    """
    with chain_locked(home.ledger):
        signer = load_signer(home.keys)
        chain = read_chain(home.ledger)
        link = chain.link_of(folder.name)
        if link is not None:
            return _restore_receipt(folder, link, signer)
        content = receipt_bytes(folder, chain.next_seq, chain.head, signer)
        sha256 = hashlib.sha256(content).hexdigest()
        _write_receipt_file(folder, content)
        crashpoint("before ledger.append")
        new = Link(seq=chain.next_seq, run=folder.name, receipt_sha256=sha256, prev=chain.head)
        append_link(home.ledger, chain, new)
        crashpoint("after ledger.append")
        return WrittenReceipt(new.seq, sha256, signed=signer is not None)


def _restore_receipt(folder: RunFolder, link: Link, signer: Signer | None) -> WrittenReceipt:
    """Make the receipt of `link` again if it is not on disk; VerificationFailed if it is no longer the same."""
    content = read_regular(folder.receipt) if folder.receipt.exists() else b""
    if hashlib.sha256(content).hexdigest() != link.receipt_sha256:
        content = receipt_bytes(folder, link.seq, link.prev, signer)
        if hashlib.sha256(content).hexdigest() != link.receipt_sha256:
            raise VerificationFailed(
                "receipt.differs",
                f"Receipt #{link.seq:04d} of {folder.name} was lost or changed, and its run folder makes another one.",
                hint=f"Restore {folder.receipt} from a copy; `gpurun audit {folder.name}` shows what differs.",
            )
        _write_receipt_file(folder, content)
    return WrittenReceipt(link.seq, link.receipt_sha256, signed=bool(json.loads(content)["signatures"]))


def _write_receipt_file(folder: RunFolder, content: bytes) -> None:
    crashpoint("before receipt.write")
    try:
        write_atomic(folder.receipt, content)
    except OSError as error:
        raise unwritable_error(folder.receipt, error) from error
    crashpoint("after receipt.write")


def receipt_bytes(folder: RunFolder, seq: int, prev: str, signer: Signer | None) -> bytes:
    """Return a run's receipt for a place in the chain: the same bytes for the same run folder, place and key.

    Raise JournalDamaged if the journal is damaged or empty.
    """
    reading = read_journal(folder.journal)
    if reading.damage is not None or not reading.records:
        why = reading.damage or "it is empty"
        raise JournalDamaged(
            "journal.damaged",
            f"No receipt can be made for {folder.name}: its journal is damaged, {why}.",
            hint=f"End any machine that the run may have left: gpurun destroy {folder.name}.",
        )
    basis = basis_of(reading.records)
    rest = reading.records[len(basis) :]
    head = rest[0].prev if rest else reading.head
    keyid = signer.keyid if signer else None
    statement = build_statement(folder, basis, head=head, seq=seq, prev=prev, keyid=keyid)
    return (json.dumps(make_envelope(canonical(dict(statement)), signer), indent=2, sort_keys=True) + "\n").encode()


def read_receipt(home: Home, folder: RunFolder) -> Receipt:
    """Read a run's receipt and check its signature; only the audit checks the figures in it.

    Raise UsageError if there is no receipt, VerificationFailed if the file is not one, SetupError if it cannot be read.
    """
    try:
        content = read_regular(folder.receipt)
    except FileNotFoundError:
        raise UsageError(
            "receipt.none",
            f"The run {folder.name} has no receipt yet.",
            hint=f"It is written when the run ends: gpurun attach {folder.name}, or gpurun resume {folder.name}.",
        ) from None
    except OSError as error:
        raise SetupError(
            "receipt.shut",
            f"{folder.receipt} cannot be read: {error.strerror}.",
            hint="Give yourself read access to it and to its folder.",
        ) from error
    try:
        envelope = parse_object(content)
        statement = parse_object(payload_of(envelope))
        if not isinstance(statement.get("predicate"), dict):
            raise ValueError("it has no predicate")
        signature = verify(envelope, public_keys(home.keys))
    except ValueError as error:
        raise VerificationFailed(
            "receipt.unreadable",
            f"{folder.receipt} is not a receipt: {error}.",
            hint=f"`gpurun audit {folder.name}` shows whether it can be made again.",
        ) from error
    try:
        _statement_form().validate_python(statement, strict=True)
    except ValidationError as odd:
        what = f"{folder.receipt} lacks fields of a receipt, or has them in another form."
        hint = f"`gpurun audit {folder.name}` shows what differs; restore it from a copy."
        raise VerificationFailed("receipt.unreadable", what, hint=hint) from odd
    return Receipt(cast(Statement, statement), envelope, hashlib.sha256(content).hexdigest(), signature)


@cache
def _statement_form() -> TypeAdapter[Statement]:
    return TypeAdapter(Statement)
