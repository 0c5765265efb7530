"""The statement that the user's own box was shut down after a run: `shutdown.json`, beside the receipt.

gpurun cannot end such a box, so its receipt leaves the shutdown to the user. This signed in-toto Statement records the
later checks of the box, or the user's own words, and claims no more: a box that does not answer SSH may still be
billed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.errors import VerificationFailed
from gpurun.core.money import Figure, Micros, cost_of
from gpurun.core.paths import Home, RunFolder, write_atomic
from gpurun.core.receipt_record import Receipt, Signature
from gpurun.core.records import canonical
from gpurun.core.untrusted import parse_object, plain_line, read_object
from gpurun.ledger.fsync import unwritable_error
from gpurun.ledger.signing import load_signer, make_envelope, payload_of, public_keys, verify
from gpurun.ledger.statement import STATEMENT_TYPE

SHUTDOWN_TYPE = "https://gpurun.dev/shutdown/v1"
NAME = "shutdown.json"
CONFIRMED, STATED = "confirmed", "stated by the user"


@dataclass(frozen=True)
class Try:
    """One check of the box: its time in seconds after the first check, and its result."""

    at_s: float
    seen: str


@dataclass(frozen=True)
class Confirmation:
    """A statement as it was written or read. `problem` says why it is not valid for the receipt; "" if it is."""

    predicate: dict[str, Any]
    signature: Signature
    problem: str

    @property
    def is_seen(self) -> bool:
        """Return whether the statement is valid and is based on checks, not on the user's words."""
        return not self.problem and self.predicate["verdict"] == CONFIRMED


def write_confirmation(
    home: Home, folder: RunFolder, receipt: Receipt, tries: Sequence[Try], *, words: str, wall: float
) -> Confirmation:
    """Sign and write a statement about the checks `tries`, made at `wall`, or about the user's `words` if not empty.

    Raise SetupError if the disk refuses. Without a readable key, the statement is unsigned.
    """
    signer, confirmed_at = load_signer(home.keys), utc(wall)
    predicate = {
        "v": 1,
        "run": folder.name,
        "box": box_of(receipt),
        "confirmed_at": confirmed_at,
        "verdict": STATED if words else CONFIRMED,
        "checked": {
            "is": "measured",
            "how": "a connection to its SSH port, and a wait for its greeting",
            "tries": [{"at_s": round(check.at_s, 3), "seen": check.seen} for check in tries],
        },
        "words": plain_line(words) or None,
        "cost": {"until_confirmed_micros": _compute_cost(receipt, confirmed_at), "is": str(Figure.BOUND)},
        "signing": {"keyid": signer.keyid if signer else None},
    }
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": f"{folder.name}/receipt.json", "digest": {"sha256": receipt.sha256}}],
        "predicateType": SHUTDOWN_TYPE,
        "predicate": predicate,
    }
    envelope = make_envelope(canonical(statement), signer)
    path = folder.path / NAME
    try:
        write_atomic(path, (json.dumps(envelope, indent=2, sort_keys=True) + "\n").encode())
    except OSError as error:
        raise unwritable_error(path, error) from error
    return Confirmation(predicate, Signature.OK if signer else Signature.UNSIGNED, "")


def box_of(receipt: Receipt) -> str:
    """Return the box in a receipt as `user@host:port`; "" if the receipt has no machine."""
    machine = receipt.predicate["instance"]
    return machine["type"] if machine else ""


def _compute_cost(receipt: Receipt, confirmed_at: str) -> Micros | None:
    """Return what the box cost from the request until `confirmed_at`, at the receipt's rate.

    None if the time of the request is unknown, or if there was no rental. Only times in the receipt and the statement
    are used, because the audit has no others. A clock that was set back in between does not make the time shorter than
    the receipt's own.
    """
    times, rentals = receipt.predicate["timeline"], receipt.predicate["cost"]["rentals"]
    if times["asked"] == "unknown" or not rentals:
        return None
    last = rentals[-1]
    since_asked_s, since_gone_s = (
        (datetime.fromisoformat(confirmed_at) - datetime.fromisoformat(times[name])).total_seconds()
        for name in ("asked", "gone")
    )
    seconds = max(since_asked_s, (last["billable_s"] or 0.0) + since_gone_s)
    return cost_of(Micros(last["rate_micros_per_hour"]), seconds, last["billing_unit_s"])


def read_confirmation(home: Home, folder: RunFolder, receipt: Receipt) -> Confirmation | None:
    """Return the statement beside a receipt, with the result of checking it; None if there is no statement.

    Raise VerificationFailed if the file is not such a statement.
    """
    path = folder.path / NAME
    try:
        envelope = read_object(path)
        statement = parse_object(payload_of(envelope))
        predicate, subject = statement["predicate"], statement["subject"]
        if statement["predicateType"] != SHUTDOWN_TYPE or not _has_shown_form(predicate):
            raise ValueError("it states something else")
        about = subject[0]["digest"]["sha256"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise VerificationFailed(
            "shutdown.unreadable",
            f"{path} is not a statement about a shutdown: {type(error).__name__}.",
            hint=f"Move the file away, then: gpurun confirm-shutdown {folder.name}",
        ) from error
    signature = verify(envelope, public_keys(home.keys))
    problem = ""
    if signature not in (Signature.OK, Signature.UNSIGNED):
        problem = f"its signature does not hold ({signature})"
    elif about != receipt.sha256 or predicate.get("box") != box_of(receipt):
        problem = "it is about another receipt"
    return Confirmation(predicate, signature, problem)


def _has_shown_form(claim: dict[str, Any]) -> bool:
    """Return whether the parts of a predicate that gpurun shows have the right form: anyone could write the file."""
    tries, cost, at = claim["checked"]["tries"], claim["cost"]["until_confirmed_micros"], claim["confirmed_at"]
    return (
        claim["verdict"] in (CONFIRMED, STATED)
        and utc(datetime.fromisoformat(at).timestamp()) == at
        and bool(tries)
        and all(type(check["at_s"]) is float and plain_line(check["seen"]) == check["seen"] for check in tries)
        and (cost is None or type(cost) is int)
    )
