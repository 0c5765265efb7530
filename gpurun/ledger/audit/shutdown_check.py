"""The audit's own code to check the statement that the user's own box was shut down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from gpurun.core.money import Micros, cost_of
from gpurun.core.paths import RunFolder, read_regular
from gpurun.core.receipt_record import Signature
from gpurun.core.records import canonical
from gpurun.core.untrusted import Malformed, finding, parse_object
from gpurun.ledger.audit.strict_lines import Json
from gpurun.ledger.signing import payload_of, verify

_TYPE = "https://gpurun.dev/shutdown/v1"
_QUIET = {"refused", "timed out", "unreachable"}
_SPAN_S = 9.0
_WORDS = {"confirmed": "shutdown confirmed", "stated by the user": "shutdown stated"}


@dataclass(frozen=True)
class Shutdown:
    """The audit's word for the end of a box, and the problem with the statement about it; "" for none.

    `unsigned` is a message if the statement is unsigned; "" otherwise.
    """

    death: str
    problem: str = ""
    unsigned: str = ""


def check_shutdown(
    folder: RunFolder, statement: Json, receipt_sha256: str, keys: Mapping[str, Ed25519PublicKey]
) -> Shutdown | None:
    """Return the end of the user's own box, by its statement if there is one; None for a machine that gpurun ends.

    A statement about a machine that gpurun ends is a problem.
    """
    path = folder.path / "shutdown.json"
    is_users = statement["predicate"]["teardown"]["is"] == "user_operated"
    if not path.exists():
        return Shutdown("yours to end") if is_users else None
    if not is_users:
        return Shutdown("proven", problem="shutdown.json is about a machine that was not the user's to end")
    faults: list[str] = []
    with finding(faults.append, "shutdown.json cannot be followed"):
        envelope = parse_object(read_regular(path))
        payload = payload_of(envelope)
        confirmation = parse_object(payload)
        if canonical(confirmation) != payload:
            raise Malformed("it is not in canonical form")
        unlike = _list_unlike_parts(confirmation, statement["predicate"], folder.name, receipt_sha256)
        keyid, signers = (
            confirmation["predicate"]["signing"]["keyid"],
            [signature["keyid"] for signature in envelope["signatures"]],
        )
        signature = verify(envelope, keys) if signers == ([keyid] if keyid else []) else Signature.BAD
    if faults:
        return Shutdown("yours to end", problem=faults[0])
    if unlike:
        return Shutdown("yours to end", problem=f"shutdown.json does not follow from the run: {', '.join(unlike)}")
    if signature is Signature.UNSIGNED:
        return Shutdown(_WORDS[confirmation["predicate"]["verdict"]], unsigned="shutdown.json is unsigned")
    if signature is not Signature.OK:
        return Shutdown("yours to end", problem=f"the signature of shutdown.json is not valid ({signature})")
    return Shutdown(_WORDS[confirmation["predicate"]["verdict"]])


def _list_unlike_parts(confirmation: Json, receipt: Json, run: str, receipt_sha256: str) -> list[str]:
    """Return the names of the parts of a statement that do not follow from the receipt or the checks in it."""
    predicate = confirmation["predicate"]
    tries = predicate["checked"]["tries"]
    is_seen = {attempt["seen"] for attempt in tries} <= _QUIET and tries[-1]["at_s"] - tries[0]["at_s"] >= _SPAN_S
    expected: dict[str, Any] = {
        "type": (confirmation["predicateType"], _TYPE),
        "subject": (confirmation["subject"], [{"name": f"{run}/receipt.json", "digest": {"sha256": receipt_sha256}}]),
        "run": (predicate["run"], run),
        "box": (predicate["box"], (receipt["instance"] or {}).get("type")),
        "verdict": (predicate["verdict"], "stated by the user" if predicate["words"] else "confirmed"),
        "tries": (is_seen or bool(predicate["words"]), True),
        "cost": (predicate["cost"]["until_confirmed_micros"], _compute_cost(receipt, predicate["confirmed_at"])),
        "time": (predicate["confirmed_at"] >= receipt["timeline"]["gone"], True),
    }
    return [name for name, (is_so, should_be) in expected.items() if is_so != should_be]


def _compute_cost(receipt: Json, confirmed_at: str) -> Micros | None:
    rentals, until = receipt["cost"]["rentals"], datetime.fromisoformat(confirmed_at)
    if receipt["timeline"]["asked"] == "unknown" or not rentals:
        return None
    whole = (until - datetime.fromisoformat(receipt["timeline"]["asked"])).total_seconds()
    after = (until - datetime.fromisoformat(receipt["timeline"]["gone"])).total_seconds()
    longest = max(whole, rentals[-1]["billable_s"] + after)
    return cost_of(Micros(rentals[-1]["rate_micros_per_hour"]), longest, rentals[-1]["billing_unit_s"])
