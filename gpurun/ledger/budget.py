"""Budgets: limits on what several rentals cost together.

A budget is a file of amounts under one lock. The most that a rental may cost is held in the budget before the machine
is requested, and replaced by the cost when its end is proven. The month of a home is one budget, a mandate another
(`mandate.py`); a rental is held in all budgets that apply to it. This happens after the create intent is on disk and
before the request. So even if gpurun is killed, what is held is an upper bound of the rental's cost.

For an approved run that has no rental yet, the amount is reserved. A reservation counts while a supervisor drives the
run, and for a minute before that. So if several runs are approved at the same time, only those start for which the
budgets have room.
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
    """One amount in a budget: the most that a rental may cost until `until_wall` or, once it is `settled`, its cost.

    `who` is the run. `receipt` is the digest of the receipt that states the cost, "" if there is none yet. `reserved`
    means that the run is approved, and that no machine has been requested.
    """

    who: str
    micros: Micros
    until_wall: float
    receipt: str = ""
    settled: bool = False
    reserved: bool = False

    @property
    def is_spent(self) -> bool:
        """Return whether the amount is the cost of an ended rental, and not only what it may cost."""
        return self.settled or bool(self.receipt)


_FORM: TypeAdapter[dict[str, Held]] = TypeAdapter(dict[str, Held])


class Budget(ABC):
    """A limit on the cost of several rentals of one home. `Budgets` uses its budgets in the order of their `name`."""

    name: str
    cure: str
    """The hint for a budget's file that cannot be used."""

    def __init__(self, home: Home, clock: Clock) -> None:
        self._home, self._clock = home, clock

    @property
    @abstractmethod
    def path(self) -> Path:
        """Return the file with the budget's amounts."""

    @abstractmethod
    def limit(self) -> Micros | None:
        """Return how much the rentals may cost together; None if there is no limit and they are only recorded."""

    @abstractmethod
    def begins_wall(self) -> float:
        """Return the time from which amounts count: one whose `until_wall` is earlier is forgotten."""

    @abstractmethod
    def refusal(self, limit: Micros, worst: Micros, others: Sequence[Held]) -> NoOffer:
        """Return the error for a rental that may cost `worst`, for which the limit has no room beside the `others`."""

    def hold(self, token: str, who: str, worst: Micros, until_wall: float) -> bool:
        """Hold the most that a rental may cost, in place of what is reserved for its run.

        Return whether the hold is new; a second call with the same token replaces the hold. Raise NoOffer if the limit
        has no room; then nothing is changed.
        """
        limit = self.limit()
        with self._open_entries() as entries:
            reserved = [name for name, held in entries.items() if held.reserved and held.who == who]
            others = {name: held for name, held in entries.items() if name not in (token, *reserved)}
            self.demand_room(limit, who, worst, list(others.values()))
            is_new = token not in entries
            for name in reserved:
                del entries[name]
            entries[token] = Held(who=who, micros=worst, until_wall=until_wall)
            return is_new

    def reserve(self, token: str, run: str, worst: Micros) -> None:
        """Reserve what an approved run may cost. This ends when its rental is held, or when no process drives the run.

        `token` is the name of the reservation. Raise NoOffer if the limit has no room.
        """
        limit = self.limit()
        with self._open_entries() as entries:
            self.demand_room(limit, run, worst, list(entries.values()))
            until_wall = self._clock.wall() + RESERVED_S
            entries[token] = Held(who=run, micros=worst, until_wall=until_wall, reserved=True)

    def demand_room(self, limit: Micros | None, who: str, worst: Micros, others: Sequence[Held]) -> None:
        """Raise `refusal` if the limit has no room for the amount `worst` beside the others; `who` is the run."""
        if limit is not None and total(worst, *(held.micros for held in others)) > limit:
            raise self.refusal(limit, worst, others)

    def settle(self, token: str, paid: Micros, receipt: str = "") -> None:
        """Replace what was held or reserved by what was paid; if nothing was paid, remove it."""
        with self._open_entries() as entries:
            before = entries.pop(token, None)
            if paid:  # This counts even if the hold was lost.
                who, until_wall = before.who if before else "", self._clock.wall()
                entries[token] = Held(who=who, micros=paid, until_wall=until_wall, receipt=receipt, settled=True)

    def left(self) -> Micros | None:
        """Return what is left of the limit now; None if there is no limit."""
        limit = self.limit()
        if limit is None:
            return None
        with self._open_entries() as entries:
            return left_of(limit, total(*(held.micros for held in entries.values())))

    def entries(self) -> list[Held]:
        """Return all amounts that count now."""
        with self._open_entries() as entries:
            return list(entries.values())

    @contextmanager
    def _open_entries(self) -> Iterator[dict[str, Held]]:
        """Yield the amounts that count now, by token, and write them back at the end; the lock is held meanwhile.

        After an exception in the `with` block, nothing is written. Raise SetupError if the file cannot be used.
        """
        first_wall = self.begins_wall()
        try:
            with exclusive(self.path.with_name(f".{self.path.stem}.lock")):
                entries = {
                    name: held for name, held in self._on_file().items() if self._is_still_counted(held, first_wall)
                }
                yield entries
                content = {token: held.model_dump(mode="json") for token, held in entries.items()}
                write_atomic(self.path, json.dumps(content, indent=1).encode() + b"\n")
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is damaged"
            raise SetupError("budget.unreadable", f"{self.path} cannot be used: {why}.", hint=self.cure) from error

    def _on_file(self) -> dict[str, Held]:
        """Return the amounts in the file by token; {} if there is no file."""
        return _FORM.validate_json(read_regular(self.path)) if self.path.exists() else {}

    def _is_still_counted(self, held: Held, first_wall: float) -> bool:
        """Return whether an amount still counts; a reservation ends after its time, unless a process drives the run."""
        if held.reserved and held.until_wall < self._clock.wall():
            return holder_of(self._home.run(held.who).lock) is not None
        return held.until_wall >= first_wall


class MonthBudget(Budget):
    """The budget for the rentals of this calendar month in UTC. Its limit is the setting `budget.month`.

    A rental that began in an earlier month counts, too, if it ends in this one. A project file cannot change the limit.
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
        """See `Budget.refusal`. The error states what is spent, and how much open runs may still cost."""
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
    """All budgets that apply to a run: the amount for a rental is held in all of them, or in none."""

    def __init__(self, budgets: Sequence[Budget] = ()) -> None:
        self._budgets = sorted(budgets, key=lambda budget: budget.name)

    def hold(self, token: str, who: str, worst: Micros, until_wall: float) -> None:
        """Hold a rental in each budget, always in the same order. If a budget refuses, remove the new holds and raise.

        A hold that an earlier supervisor of the run made is kept, because that machine may have been requested.
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
        """Reserve what an approved run may cost, in all budgets or in none; the `with` block starts the run.

        After an error in the block, the reservations are removed. Nothing is reserved for a run that costs nothing.
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
        """Call `Budget.settle` of each budget."""
        for budget in self._budgets:
            budget.settle(token, paid, receipt)
