"""The statement that a box of the user's own was shut down after a run: `shutdown.json`, beside the receipt.

A receipt of such a box ends with "yours to do", because gpurun cannot end it. This signed in-toto Statement says what
was seen there later, or what the user says, and never more: that nothing answers SSH is no proof that nothing bills.
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
from gpurun.ledger.fsync import unwritable
from gpurun.ledger.signing import load_signer, make_envelope, payload_of, public_keys, verify
from gpurun.ledger.statement import STATEMENT_TYPE

SHUTDOWN_TYPE = "https://gpurun.dev/shutdown/v1"
NAME = "shutdown.json"
CONFIRMED, STATED = "confirmed", "stated by the user"


@dataclass(frozen=True)
class Try:
    """One look at the box: seconds after the first, and what was seen."""

    at_s: float
    seen: str


@dataclass(frozen=True)
class Confirmation:
    """A statement as it was read. `problem` says why it does not hold for the receipt; "" when it does."""

    predicate: dict[str, Any]
    signature: Signature
    problem: str

    @property
    def is_seen(self) -> bool:
        """Whether it rests on what was seen, not on the user's word."""
        return not self.problem and self.predicate["verdict"] == CONFIRMED


def write_confirmation(
    home: Home, folder: RunFolder, receipt: Receipt, tries: Sequence[Try], *, words: str, wall: float
) -> Confirmation:
    """State, sign and write what was seen at `wall`; `words` are the user's own, where they say it instead.

    Raises a SetupError when the disk refuses.
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
            "tries": [{"at_s": round(one.at_s, 3), "seen": one.seen} for one in tries],
        },
        "words": plain_line(words) or None,
        "cost": {"until_confirmed_micros": _cost(receipt, confirmed_at), "is": str(Figure.BOUND)},
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
        raise unwritable(path, error) from error
    return Confirmation(predicate, Signature.OK if signer else Signature.UNSIGNED, "")


def box_of(receipt: Receipt) -> str:
    """The box that a receipt is about, as `user@host:port`; "" when no machine was used."""
    machine = receipt.predicate["instance"]
    return machine["type"] if machine else ""


def _cost(receipt: Receipt, confirmed_at: str) -> Micros | None:
    """What the box cost from the asking to a stamp, at the rate of the receipt; None when a time is unknown.

    Both times are the stated ones, to the millisecond: a checker has no others. What the receipt counts up to
    its end is never less here, also where a clock was set back meanwhile.
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
    """The statement about a receipt, and whether it holds; None when there is none.

    VerificationFailed when the file is no such statement at all.
    """
    path = folder.path / NAME
    try:
        envelope = read_object(path)
        statement = parse_object(payload_of(envelope))
        predicate, subject = statement["predicate"], statement["subject"]
        if statement["predicateType"] != SHUTDOWN_TYPE or not _is_shown(predicate):
            raise ValueError("it states something else")
        about = subject[0]["digest"]["sha256"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise VerificationFailed(
            "shutdown.unreadable",
            f"{path} is no statement about a shutdown: {type(error).__name__}.",
            hint=f"Move the file away, then: gpurun confirm-shutdown {folder.name}",
        ) from error
    signature = verify(envelope, public_keys(home.keys))
    problem = ""
    if signature not in (Signature.OK, Signature.UNSIGNED):
        problem = f"its signature does not hold ({signature})"
    elif about != receipt.sha256 or predicate.get("box") != box_of(receipt):
        problem = "it is about another receipt"
    return Confirmation(predicate, signature, problem)


def _is_shown(told: dict[str, Any]) -> bool:
    """Whether all that people are shown of a statement has its form; anybody may have written the file."""
    tries, cost, at = told["checked"]["tries"], told["cost"]["until_confirmed_micros"], told["confirmed_at"]
    return (
        told["verdict"] in (CONFIRMED, STATED)
        and utc(datetime.fromisoformat(at).timestamp()) == at
        and bool(tries)
        and all(type(one["at_s"]) is float and plain_line(one["seen"]) == one["seen"] for one in tries)
        and (cost is None or type(cost) is int)
    )
