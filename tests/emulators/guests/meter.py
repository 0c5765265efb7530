"""An independent count of what a provider would bill, whatever gpurun believes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

_HOUR_S = 3600


@dataclass
class _Stretch:
    """A period of a machine at one price per hour. `stopped_wall` is None while the period lasts."""

    started_wall: Fraction
    micros_per_hour: int
    stopped_wall: Fraction | None = None


@dataclass
class _Account:
    """One bill of a machine: its periods, and how the provider rounds, up to `unit_s` and to at least `least_s`."""

    unit_s: int
    least_s: int
    stretches: list[_Stretch]

    @property
    def running(self) -> bool:
        return self.stretches[-1].stopped_wall is None

    def micros(self, now: Fraction) -> int:
        """Return the bill so far: its time rounded up to the unit at the last price, its sum up to the micro-dollar."""
        lengths = [max(Fraction(0), (s.stopped_wall or now) - s.started_wall) for s in self.stretches]
        used_s = sum(lengths, Fraction(0))
        billed_s = max(Fraction(ceil(used_s / self.unit_s) * self.unit_s), Fraction(self.least_s))
        lengths[-1] += billed_s - used_s
        costs = (length * s.micros_per_hour for length, s in zip(lengths, self.stretches, strict=True))
        return ceil(sum(costs, Fraction(0)) / _HOUR_S)


class Meter:
    """A count of what every machine costs, in integer micro-dollars. Any thread may call it.

    Each start after a stop is a new bill with its own rounding and minimum, as in clouds. `clock_wall` returns seconds;
    times are kept as exact fractions, so that floating point loses nothing.
    """

    def __init__(self, clock_wall: Callable[[], float]) -> None:
        self._clock_wall = clock_wall
        self._lock = threading.Lock()
        self._accounts: dict[str, list[_Account]] = {}

    def start(self, id: str, micros_per_hour: int, unit_s: int = 1, least_s: int = 0) -> None:
        """Begin to bill a machine. Raise ValueError if it is billed already: an emulator must know its own machines."""
        with self._lock:
            if self._is_running(id):
                raise ValueError(f"{id} is billed already")
            account = _Account(unit_s, least_s, [_Stretch(self._now(), micros_per_hour)])
            self._accounts.setdefault(id, []).append(account)

    def stop(self, id: str) -> None:
        """End the billing of a machine; do nothing if it is not billed."""
        with self._lock:
            if self._is_running(id):
                self._accounts[id][-1].stretches[-1].stopped_wall = self._now()

    def set_rate(self, id: str, micros_per_hour: int) -> None:
        """Change a machine's price per hour from now on. Raise KeyError if it is not billed."""
        with self._lock:
            if not self._is_running(id):
                raise KeyError(id)
            account, now = self._accounts[id][-1], self._now()
            account.stretches[-1].stopped_wall = now
            account.stretches.append(_Stretch(now, micros_per_hour))

    def total_micros(self, id: str | None = None) -> int:
        """Return what one machine, or all with None, have cost until now; 0 for a machine that was never billed."""
        with self._lock:
            now = self._now()
            chosen = self._accounts.values() if id is None else [self._accounts.get(id, [])]
            return sum(account.micros(now) for accounts in chosen for account in accounts)

    @property
    def running(self) -> list[str]:
        """Return the machines that are billed now, in the order in which they were first started."""
        with self._lock:
            return [id for id in self._accounts if self._is_running(id)]

    def _is_running(self, id: str) -> bool:
        return id in self._accounts and self._accounts[id][-1].running

    def _now(self) -> Fraction:
        return Fraction(self._clock_wall())
