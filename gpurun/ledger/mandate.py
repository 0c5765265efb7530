"""Mandates. A mandate is a file that limits how much a process may spend, and on what; it is one of the budgets.

A person makes it, and the home's key signs it. The amounts that were spent under it are kept in the home. They are
never forgotten: the money for a machine that may exist stays held until the machine's end is proven.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError

from gpurun.core.clock import Clock, utc
from gpurun.core.errors import GpurunError, NoOffer, SetupError
from gpurun.core.money import Micros, format_left, format_usd, left_of, total
from gpurun.core.paths import MANDATE_VARIABLE, Home, make_private, read_regular, write_atomic
from gpurun.core.receipt_record import Signature
from gpurun.core.records import Frozen
from gpurun.core.untrusted import Malformed, parse_object
from gpurun.ledger.budget import Budget, Budgets, Held, MonthBudget
from gpurun.ledger.signing import PUBLIC_NAME, load_signer, make_envelope, parse_public_key, payload_of, verify

PAYLOAD_TYPE = "application/vnd.gpurun.mandate+json"
MOST_BYTES = 64 << 10
_ID = re.compile(r"[0-9a-f]{8}")


class Mandate(Frozen):
    """The terms of a mandate: how much may be spent, and on what.

    `total_micros` is the limit for all runs together, `per_run_micros` for each run. Without `providers`, every cloud
    that rents by a key is allowed; without `cards`, every GPU. Everything that is uploaded must be below the folder
    `root`. `setups` are the digests of the allowed scripts, `secrets` the names of the allowed secrets, `images` the
    allowed images.
    """

    v: Literal[1] = 1
    id: str
    home: str
    total_micros: Micros
    per_run_micros: Micros
    rate_max_micros_per_hour: Micros | None = None
    providers: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()
    made_wall: float
    until_wall: float
    root: str
    secrets: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    setups: tuple[str, ...] = ()
    spot: bool = False

    @property
    def name(self) -> str:
        """Return the mandate's name among the budgets."""
        return f"mandate {self.id}"


def folder_of(home: Home) -> Path:
    """Return the folder of a home's mandates and of the amounts that were spent under each."""
    return home.root / "mandates"


def file_of(home: Home, mandate_id: str) -> Path:
    """Return the path of the home's own copy of a mandate."""
    return folder_of(home) / f"{mandate_id}.json"


def write_mandate(home: Home, clock: Clock, **terms: Any) -> tuple[Mandate, Path]:
    """Sign a new mandate with the given terms and store it, with nothing spent; return it and the path of its file.

    Raise SetupError if the home has no key that can sign it.
    """
    signer = load_signer(home.prepare().keys)
    if signer is None:
        what = f"This home's key must sign a mandate, and {home.keys} has no readable key."
        raise SetupError("mandate.no_key", what, hint="See The form in docs/RECEIPTS.md for how to begin again.")
    mandate = Mandate(id=secrets.token_hex(4), home=home.id, made_wall=clock.wall(), **terms)
    make_private(folder_of(home))
    envelope = make_envelope(mandate.to_json().encode(), signer, PAYLOAD_TYPE)
    write_atomic(MandateBudget(home, clock, mandate.id).path, b"{}\n")
    path = file_of(home, mandate.id)
    write_atomic(path, json.dumps(envelope, indent=1).encode() + b"\n")
    return mandate, path


def read_mandate(path: Path, home: Home) -> Mandate:
    """Read a mandate that this home signed; SetupError if it was edited, is another home's, or is not a mandate.

    The mandate may be expired or revoked: only `MandateBudget.mandate` checks that.
    """
    hint = "Ask the person who gave it to you for a new one; `gpurun mandate new` writes one at a terminal."
    try:
        envelope = parse_object(read_regular(path, MOST_BYTES))
        keys = _read_own_key(home)
        found = verify(envelope, keys, PAYLOAD_TYPE)
        mandate = Mandate.from_json(payload_of(envelope))
    except OSError as error:
        what = f"The mandate {path} cannot be read: {error.strerror or error}."
        raise SetupError("mandate.unreadable", what, hint=hint) from error
    except (Malformed, ValidationError, ValueError, KeyError, TypeError) as error:
        what = f"{path} is not a mandate, or it was edited."
        raise SetupError("mandate.edited", what, hint=hint) from error
    if found in (Signature.UNKNOWN_KEY, Signature.UNSIGNED) or mandate.home != home.id:
        what = f"The mandate {path} was not signed by the key of this home, {home.root}."
        raise SetupError("mandate.foreign", what, hint=hint)
    if found is not Signature.OK or not _ID.fullmatch(mandate.id):
        what = f"The mandate {path} was edited: its signature does not match its content."
        raise SetupError("mandate.edited", what, hint=hint)
    return mandate


def _read_own_key(home: Home) -> dict[str, Ed25519PublicKey]:
    """Return this home's own public key by its id; {} if it cannot be read.

    The other public keys in `keys/` are trusted for receipts, but not for mandates.
    """
    try:
        return parse_public_key(read_regular(home.keys / PUBLIC_NAME))
    except (OSError, ValueError):
        return {}


def mandate_here(home: Home) -> Mandate | None:
    """Return the mandate in the file that GPURUN_MANDATE names; None if the variable is not set.

    SetupError if the variable is empty, and as in `read_mandate`.
    """
    named = os.environ.get(MANDATE_VARIABLE)
    if named is None:
        return None
    if not named.strip():
        what = f"{MANDATE_VARIABLE} is set but empty, so nothing is allowed."
        raise SetupError("mandate.unreadable", what, hint="Set it to the mandate's file, or unset it.")
    return read_mandate(Path(named).expanduser().absolute(), home)


def mandates_of(home: Home) -> Iterator[tuple[str, Mandate | None]]:
    """Yield the mandates of a home by id, with None for one that cannot be read."""
    for path in sorted(folder_of(home).glob("*.json")):
        if _ID.fullmatch(path.stem):
            mandate = None
            with suppress(GpurunError):
                mandate = read_mandate(path, home)
            yield path.stem, mandate


def is_revoked(home: Home, mandate_id: str) -> bool:
    """Return whether a mandate has been revoked."""
    return _revoked_mark(home, mandate_id).exists()


def revoke_mandate(home: Home, mandate_id: str) -> None:
    """Revoke a mandate for good: no run starts under it any more, but a run that has started continues to its end."""
    write_atomic(_revoked_mark(home, mandate_id), b"")


def _revoked_mark(home: Home, mandate_id: str) -> Path:
    return folder_of(home) / f"{mandate_id}.revoked"


class MandateBudget(Budget):
    """The budget of one mandate: what its runs have cost and may still cost, within its limits."""

    cure = "Nothing more can start under this mandate; ask the person who gave it to you for a new one."

    def __init__(self, home: Home, clock: Clock, mandate_id: str) -> None:
        super().__init__(home, clock)
        self._id, self.name = mandate_id, f"mandate {mandate_id}"

    @property
    def path(self) -> Path:
        """See `Budget.path`."""
        return folder_of(self._home) / f"{self._id}.spent"

    def mandate(self) -> Mandate:
        """Return the mandate, from the home's own copy; SetupError if it was edited, has expired or was revoked."""
        mandate = read_mandate(file_of(self._home, self._id), self._home)
        hint = "Ask the person who gave it to you for a new one; what runs continues to its end."
        if is_revoked(self._home, self._id):
            raise SetupError("mandate.revoked", f"The mandate {self._id} was revoked.", hint=hint)
        if self._clock.wall() >= mandate.until_wall:
            what = f"The mandate {self._id} expired at {utc(mandate.until_wall)}."
            raise SetupError("mandate.expired", what, hint=hint)
        return mandate

    def limit(self) -> Micros:
        """See `Budget.limit`; SetupError as in `mandate`."""
        return self.mandate().total_micros

    def begins_wall(self) -> float:
        """Return minus infinity: under a mandate every rental counts, however old."""
        return float("-inf")

    def demand_room(self, limit: Micros | None, who: str, worst: Micros, others: Sequence[Held]) -> None:
        """See `Budget.demand_room`. All rentals of the run `who` together must also stay within a run's limit."""
        most, own = self.mandate().per_run_micros, [held.micros for held in others if held.who == who]
        if total(worst, *own) > most:
            left = format_left(left_of(self.limit(), total(*(held.micros for held in others))))
            what = f"{who} may cost {format_usd(total(worst, *own))}, over the mandate's {format_usd(most)} for a run"
            raise NoOffer("mandate.per_run", f"{what}; {left} of its total is left.", hint="Use a smaller --max-cost.")
        super().demand_room(limit, who, worst, others)

    def refusal(self, limit: Micros, worst: Micros, others: Sequence[Held]) -> NoOffer:
        """See `Budget.refusal`."""
        spent = total(*(held.micros for held in others if held.is_spent))
        held = total(*(held.micros for held in others if not held.is_spent))
        left = format_left(left_of(limit, total(spent, held)))
        sums = f"{format_usd(spent)} spent, {format_usd(held)} held by open runs, {left} left of {format_usd(limit)}"
        hint = "Wait for a run to end, which frees what it did not need, or use a smaller --max-cost."
        return NoOffer(
            "mandate.total", f"This may cost {format_usd(worst)}, more than the mandate has left: {sums}.", hint=hint
        )

    def _on_file(self) -> dict[str, Held]:
        """See `Budget._on_file`. A missing file is an error: removing it must not make the money available again."""
        if not self.path.exists():
            raise FileNotFoundError(2, "the record of what was spent is missing", str(self.path))
        return super()._on_file()


def budgets_of(home: Home, clock: Clock, mandate_id: str = "") -> Budgets:
    """Return all budgets that apply to a run that may cost money: the month's and, if it has one, its mandate's."""
    return Budgets([MonthBudget(home, clock), *([MandateBudget(home, clock, mandate_id)] if mandate_id else [])])
