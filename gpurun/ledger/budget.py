"""Sums that rentals share: what each may cost is held before it is asked for, and settled once its end is proven.

A budget is a file of askings under one lock. The month of one home is the first; whatever else may bound several
rentals together is another `Budget` (`mandate.py`), and a rental is held in all that apply to it. It is held when its
create intent is on disk and before it is asked for, so that a hold that is found is a bound until an end is proven.

A run that was approved and has no rental yet is reserved: that counts while its supervisor lives, and for a minute
before there is one. Of several that are approved at once only as many begin as the sums pay for.
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
"""For how long an approved run is given its money before a supervisor holds the run's lock."""


class Held(Frozen):
    """What one asking may cost until then at the worst, or has cost once it is settled.

    `who` is the run; `receipt` is the digest of the receipt that says so, where there is one by now. What is `reserved`
    was approved, and nothing of it is asked for yet.
    """

    who: str
    micros: Micros
    until_wall: float
    receipt: str = ""
    settled: bool = False
    reserved: bool = False

    @property
    def is_spent(self) -> bool:
        """Whether it is what was paid, and no longer what may be."""
        return self.settled or bool(self.receipt)


_FORM: TypeAdapter[dict[str, Held]] = TypeAdapter(dict[str, Held])


class Budget(ABC):
    """One sum, for the rentals of one home; `name` says where it stands in the order in which budgets are held."""

    name: str
    cure: str
    """What to do about a file that cannot be read."""

    def __init__(self, home: Home, clock: Clock) -> None:
        self._home, self._clock = home, clock

    @property
    @abstractmethod
    def path(self) -> Path:
        """Return the file of its askings."""

    @abstractmethod
    def limit(self) -> Micros | None:
        """Return how much they may cost together; None where they are only written down."""

    @abstractmethod
    def begins_wall(self) -> float:
        """Return since when an asking counts: one that was to be over before is forgotten."""

    @abstractmethod
    def refusal(self, limit: Micros, worst: Micros, others: Sequence[Held]) -> NoOffer:
        """Return what is said where the limit does not leave what an asking may cost."""

    def hold(self, token: str, who: str, worst: Micros, until_wall: float) -> bool:
        """Set aside what an asking may cost until then, and return whether this is new: a token is held once.

        It takes the place of what is reserved for the run. NoOffer, with what holds the money, where the limit does not
        leave so much. Nothing is changed then.
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
        """Set aside what an approved run may cost, until its rental is held or it is not driven; NoOffer as `hold`."""
        limit = self.limit()
        with self._entries() as entries:
            self.demand_room(limit, run, worst, list(entries.values()))
            until_wall = self._clock.wall() + RESERVED_S
            entries[token] = Held(who=run, micros=worst, until_wall=until_wall, reserved=True)

    def demand_room(self, limit: Micros | None, who: str, worst: Micros, others: Sequence[Held]) -> None:
        """Raise the refusal where the limit does not leave so much beside the others."""
        if limit is not None and total(worst, *(held.micros for held in others)) > limit:
            raise self.refusal(limit, worst, others)

    def settle(self, token: str, paid: Micros, receipt: str = "") -> None:
        """Put what an asking has cost in the place of what was held for it; one that cost nothing is forgotten."""
        with self._entries() as entries:
            before = entries.pop(token, None)
            if paid:  # Also of one whose hold was lost: what was paid counts.
                who, until_wall = before.who if before else "", self._clock.wall()
                entries[token] = Held(who=who, micros=paid, until_wall=until_wall, receipt=receipt, settled=True)

    def left(self) -> Micros | None:
        """Return what the limit leaves of now; None where there is no limit."""
        limit = self.limit()
        if limit is None:
            return None
        with self._entries() as entries:
            return left_of(limit, total(*(held.micros for held in entries.values())))

    def entries(self) -> list[Held]:
        """Return all that counts now."""
        with self._entries() as entries:
            return list(entries.values())

    @contextmanager
    def _entries(self) -> Iterator[dict[str, Held]]:
        """Those that count, to be changed under the lock."""
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
        """Return the askings of the file; none where there is no file."""
        return _FORM.validate_json(read_regular(self.path)) if self.path.exists() else {}

    def _counts(self, held: Held, first_wall: float) -> bool:
        """Whether an entry counts still; what is reserved for a run that no process drives comes back."""
        if held.reserved and held.until_wall < self._clock.wall():
            return holder_of(self._home.run(held.who).lock) is not None
        return held.until_wall >= first_wall


class MonthBudget(Budget):
    """The rentals of this month, which is one of UTC; `budget.month` of the user's own settings is the limit.

    An asking counts in the month in which it ends, too.
    """

    name = "month"
    cure = "Give yourself access to it. Moved away, the month begins at nothing; `gpurun ps --all` says more."

    @property
    def path(self) -> Path:
        """See `Budget.path`."""
        return self._home.root / "budget.json"

    def limit(self) -> Micros | None:
        """See `Budget.limit`; UsageError where the setting is no amount."""
        told = load_settings(self._home, project=self._home.root, environment=os.environ)["budget.month"].value
        return parse_usd(told) if told else None

    def begins_wall(self) -> float:
        """See `Budget.begins_wall`."""
        now = datetime.fromtimestamp(self._clock.wall(), UTC)
        return now.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()

    def refusal(self, limit: Micros, worst: Micros, others: Sequence[Held]) -> NoOffer:
        """See `Budget.refusal`: what is spent, and which runs may still cost how much."""
        spent = total(*(held.micros for held in others if held.is_spent))
        open_micros = total(*(held.micros for held in others if not held.is_spent))
        who = ", ".join(sorted({held.who for held in others if not held.is_spent}))
        may_cost = f", and {who} may still cost {format_usd(open_micros)}" if who else ""
        gone = f"of the month's {format_usd(limit)} {format_usd(spent)} is spent"
        return NoOffer(
            "budget.month",
            f"This may cost {format_usd(worst)}; {gone}{may_cost}.",
            hint="Wait for their end (`gpurun resume` finishes a run that nobody drives), take a smaller --max-cost, "
            "or raise budget.month in config.toml.",
        )


class Budgets:
    """All budgets that apply to a run: a rental is held in every one of them, or in none."""

    def __init__(self, budgets: Sequence[Budget] = ()) -> None:
        self._budgets = sorted(budgets, key=lambda budget: budget.name)

    def hold(self, token: str, who: str, worst: Micros, until_wall: float) -> None:
        """Hold it in each, in one order; where one refuses, what was held just now is let go.

        What an earlier life of the supervisor held stays: that may have been asked for.
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
        """Reserve what an approved run may cost in each or in none, while it is begun; what fails then frees it.

        Nothing is reserved for one that is free.
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
        """Settle it in each."""
        for budget in self._budgets:
            budget.settle(token, paid, receipt)
