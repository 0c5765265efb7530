"""The month's limit: what rentals may cost together, held before each is asked for and settled by its receipt.

`budget.month` of the user's own settings is the limit, in dollars; a month is one of UTC. A later kind of limit needs
`hold` and `settle`, and no more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from pydantic import TypeAdapter, ValidationError

from gpurun.core.clock import Clock
from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.filelock import exclusive
from gpurun.core.money import Micros, format_usd, parse_usd, total
from gpurun.core.paths import Home, read_regular, write_atomic
from gpurun.core.records import Frozen
from gpurun.core.settings import load_settings

__all__ = ["MonthBudget"]


class _Held(Frozen):
    """What one asking may cost until then at the worst, or has cost by its receipt."""

    who: str
    micros: Micros
    until_wall: float
    receipt: str = ""


_FORM: TypeAdapter[dict[str, _Held]] = TypeAdapter(dict[str, _Held])


class MonthBudget:
    """The rentals of this month in one home, in a file under one lock; without a limit they are only written down."""

    def __init__(self, home: Home, clock: Clock) -> None:
        self._home, self._clock = home, clock

    def hold(self, token: str, who: str, worst: Micros, until: float) -> None:
        """Set aside what an asking may cost until then; asked again with the same token it is held once.

        NoOffer, with what holds the month's money, where the limit does not leave so much. Nothing is held then.
        """
        told = load_settings(self._home, project=self._home.root, environment=os.environ)["budget.month"].value
        with self._entries() as entries:
            others = [one for name, one in entries.items() if name != token]
            if told and total(worst, *(one.micros for one in others)) > (limit := parse_usd(told)):
                raise _over(limit, worst, others)
            entries[token] = _Held(who=who, micros=worst, until_wall=until)

    def settle(self, token: str, micros: Micros, receipt: str) -> None:
        """Put what an asking has cost in the place of what was held for it; one that cost nothing is forgotten."""
        with self._entries() as entries:
            before = entries.pop(token, None)
            if micros:  # Also of one whose hold was lost: what was paid counts.
                who = before.who if before else ""
                entries[token] = _Held(who=who, micros=micros, until_wall=self._clock.wall(), receipt=receipt)

    @contextmanager
    def _entries(self) -> Iterator[dict[str, _Held]]:
        """Those of this month, to be changed under the lock: an asking counts in the month in which it ends, too."""
        path, now = self._home.root / "budget.json", self._clock.wall()
        first = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
        try:
            with exclusive(path.with_name(".budget.lock")):
                told = _FORM.validate_json(read_regular(path)) if path.exists() else {}
                entries = {token: one for token, one in told.items() if one.until_wall >= first}
                yield entries
                content = {token: one.model_dump(mode="json") for token, one in entries.items()}
                write_atomic(path, json.dumps(content, indent=1).encode() + b"\n")
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is damaged"
            hint = "Give yourself access to it. Moved away, the month begins at nothing; `gpurun ps --all` says more."
            raise SetupError("budget.unreadable", f"{path} cannot be used: {why}.", hint=hint) from error


def _over(limit: Micros, worst: Micros, others: list[_Held]) -> NoOffer:
    """The refusal, with what is spent and which runs may still cost how much."""
    spent = total(*(one.micros for one in others if one.receipt))
    held = total(*(one.micros for one in others if not one.receipt))
    who = ", ".join(sorted({one.who for one in others if not one.receipt}))
    told = f", and {who} may still cost {format_usd(held)}" if who else ""
    return NoOffer(
        "budget.month",
        f"This may cost {format_usd(worst)}; of the month's {format_usd(limit)} {format_usd(spent)} is spent{told}.",
        hint="Wait for their end (`gpurun resume` finishes a run that nobody drives), take a smaller --max-cost, or "
        "raise budget.month in config.toml.",
    )
