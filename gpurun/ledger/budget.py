"""Budgets that rentals share: what a rental may cost is held before the request, and replaced by its cost at its end.

A budget is a file of holds under one lock. The month of one home is the first; anything else that limits several
rentals together is another `Budget` (`mandate.py`), and a rental is held in all that apply to it. It is held after its
create intent is on disk and before the request, so a hold that is found is a bound until an end is proven.

An approved run without a rental yet is reserved: this counts while its supervisor lives, and for a minute before there
is one. Of several runs that are approved at once, only as many start as the budgets can pay for.
"""

from __future__ import annotations

import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gpurun.core.clock import Clock
from gpurun.core.errors import GpurunError, NoOffer, SetupError
from gpurun.core.filelock import exclusive
from gpurun.core.money import Micros, format_usd, left_of, parse_usd, total
from gpurun.core.paths import Home, read_regular, write_atomic
from gpurun.core.records import Frozen
from gpurun.core.settings import load_settings
from gpurun.ledger.run_lock import holder_of

RESERVED_S = 60.0
"""How long an approved run keeps its reservation before a supervisor holds the run's lock."""


class Held(Frozen):
    """What one rental may cost until then at most, or what it cost once it is settled.

    `who` is the run; `receipt` is the digest of the receipt that states the cost, if there is one yet. `reserved` means
    approved, with nothing requested yet.
    """

    who: str
    micros: Micros
    until_wall: float
    receipt: str = ""
    settled: bool = False
    reserved: bool = False

    @property
    def is_spent(self) -> bool:
        """Return whether the amount was paid, and is no longer only possible."""
        return self.settled or bool(self.receipt)


_FORM: TypeAdapter[dict[str, Held]] = TypeAdapter(dict[str, Held])


class Budget(ABC):
    """One limit for the rentals of one home; a rental is held in the budgets in the order of their `name`."""

    name: str
    cure: str
    """What to do about a file that cannot be read."""

    def __init__(self, home: Home, clock: Clock) -> None:
        self._home, self._clock = home, clock

    @property
    @abstractmethod
    def path(self) -> Path:
        """Return the file of its holds."""

    @abstractmethod
    def limit(self) -> Micros | None:
        """Return how much they may cost together; None if they are only recorded."""

    @abstractmethod
    def begins_wall(self) -> float:
        """Return the time from which a rental counts: one that should have ended before it is forgotten."""

    @abstractmethod
    def refusal(self, limit: Micros, worst: Micros, others: Sequence[Held]) -> NoOffer:
        """Return the refusal of a rental for which the limit has no room."""

    def hold(self, token: str, who: str, worst: Micros, until_wall: float) -> bool:
        """Hold what a rental may cost until then, and return whether the hold is new: a token is held once.

        It replaces what is reserved for the run. Raises NoOffer, which names what holds the money, if the limit has no
        room. Nothing is changed then.
        """
        limit = self.limit()
        with self._entries() as entries:
            reserved = [name for name, held in entries.items() if held.reserved and held.who == who]
            others = {name: held for name, held in entries.items() if name not in (token, *reserved)}
            self.demand_room(limit, who, worst, list(others.values()))
            is_new = token not in entries
            for name in reserved:
                del entries[name]
            entries[token] = Held(who=who, micros=worst, until_wall=until_wall)
            return is_new

    def reserve(self, token: str, run: str, worst: Micros) -> None:
        """Reserve what an approved run may cost, until its rental is held or no process drives it."""
        limit = self.limit()
        with self._entries() as entries:
            self.demand_room(limit, run, worst, list(entries.values()))
            until_wall = self._clock.wall() + RESERVED_S
            entries[token] = Held(who=run, micros=worst, until_wall=until_wall, reserved=True)

    def demand_room(self, limit: Micros | None, who: str, worst: Micros, others: Sequence[Held]) -> None:
        """Raise the refusal if the limit has no room for it beside the others."""
        if limit is not None and total(worst, *(held.micros for held in others)) > limit:
            raise self.refusal(limit, worst, others)

    def settle(self, token: str, paid: Micros, receipt: str = "") -> None:
        """Replace what was held for a rental by what it cost; a rental that cost nothing is forgotten."""
        with self._entries() as entries:
            before = entries.pop(token, None)
            if paid:  # Also if its hold was lost: what was paid counts.
                who, until_wall = before.who if before else "", self._clock.wall()
                entries[token] = Held(who=who, micros=paid, until_wall=until_wall, receipt=receipt, settled=True)

    def left(self) -> Micros | None:
        """Return what is left of the limit now; None if there is no limit."""
        limit = self.limit()
        if limit is None:
            return None
        with self._entries() as entries:
            return left_of(limit, total(*(held.micros for held in entries.values())))

    def entries(self) -> list[Held]:
        """Return all holds that count now."""
        with self._entries() as entries:
            return list(entries.values())

    @contextmanager
    def _entries(self) -> Iterator[dict[str, Held]]:
        """Yield the holds that count, to be changed under the lock."""
        first_wall = self.begins_wall()
        try:
            with exclusive(self.path.with_name(f".{self.path.stem}.lock")):
                entries = {name: held for name, held in self._on_file().items() if self._counts(held, first_wall)}
                yield entries
                content = {token: held.model_dump(mode="json") for token, held in entries.items()}
                write_atomic(self.path, json.dumps(content, indent=1).encode() + b"\n")
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is damaged"
            raise SetupError("budget.unreadable", f"{self.path} cannot be used: {why}.", hint=self.cure) from error

    def _on_file(self) -> dict[str, Held]:
        """Return the holds in the file; none if there is no file."""
        return _FORM.validate_json(read_regular(self.path)) if self.path.exists() else {}

    def _counts(self, held: Held, first_wall: float) -> bool:
        """Return whether a hold still counts; money reserved for a run that no process drives is free again."""
        if held.reserved and held.until_wall < self._clock.wall():
            return holder_of(self._home.run(held.who).lock) is not None
        return held.until_wall >= first_wall


class MonthBudget(Budget):
    """The rentals of this calendar month in UTC; the limit is `budget.month` of the user's own settings.

    A rental also counts in the month in which it ends.
    """

    name = "month"
    cure = "Give yourself access to it. If you move it away, the month starts again at $0; see `gpurun ps --all`."

    @property
    def path(self) -> Path:
        """See `Budget.path`."""
        return self._home.root / "budget.json"

    def limit(self) -> Micros | None:
        """See `Budget.limit`; UsageError if the setting is not an amount."""
        amount = load_settings(self._home, project=self._home.root, environment=os.environ)["budget.month"].value
        return parse_usd(amount) if amount else None

    def begins_wall(self) -> float:
        """See `Budget.begins_wall`."""
        now = datetime.fromtimestamp(self._clock.wall(), UTC)
        return now.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()

    def refusal(self, limit: Micros, worst: Micros, others: Sequence[Held]) -> NoOffer:
        """See `Budget.refusal`: what is spent, and how much open runs may still cost."""
        spent = total(*(held.micros for held in others if held.is_spent))
        open_micros = total(*(held.micros for held in others if not held.is_spent))
        who = ", ".join(sorted({held.who for held in others if not held.is_spent}))
        may_cost = f", and {who} may still cost {format_usd(open_micros)}" if who else ""
        gone = f"{format_usd(spent)} of the month's {format_usd(limit)} is spent"
        return NoOffer(
            "budget.month",
            f"This may cost {format_usd(worst)}; {gone}{may_cost}.",
            hint="Wait until they end (`gpurun resume` finishes a run that no process drives), lower --max-cost, "
            "or raise budget.month in config.toml.",
        )


class Budgets:
    """All budgets that apply to a run: a rental is held in all of them, or in none."""

    def __init__(self, budgets: Sequence[Budget] = ()) -> None:
        self._budgets = sorted(budgets, key=lambda budget: budget.name)

    def hold(self, token: str, who: str, worst: Micros, until_wall: float) -> None:
        """Hold a rental in each budget, always in the same order; if one refuses, the new holds are released.

        What an earlier supervisor of the run held stays: that machine may have been requested.
        """
        new: list[Budget] = []
        for budget in self._budgets:
            try:
                if budget.hold(token, who, worst, until_wall):
                    new.append(budget)
            except GpurunError:
                for held in new:
                    held.settle(token, Micros(0))
                raise

    @contextmanager
    def reserved(self, run: str, worst: Micros) -> Iterator[None]:
        """Reserve what an approved run may cost, in all budgets or in none, while it starts; an error frees it.

        Nothing is reserved for a free run.
        """
        token, done = f"approved-{run}-{secrets.token_hex(4)}", list[Budget]()
        try:
            for budget in self._budgets if worst else ():
                budget.reserve(token, run, worst)
                done.append(budget)
            yield
        except BaseException:
            for budget in done:
                budget.settle(token, Micros(0))
            raise

    def settle(self, token: str, paid: Micros, receipt: str = "") -> None:
        """Settle the rental in each budget."""
        for budget in self._budgets:
            budget.settle(token, paid, receipt)
