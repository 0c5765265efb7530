"""Do to a run what its scenario contains: faults of calls, bad weather, and deeds at the wrong moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.emulators.fake import Fault
from tests.simulation.laptop import LaptopClock
from tests.simulation.scenario import Deed, Scenario, Weather

MOST_POINTS = 30_000


class Killed(BaseException):
    """The death of the supervisor, as by SIGKILL: none of its code runs after it."""


class Endless(BaseException):
    """The end of a simulation that has passed MOST_POINTS points, which a sound run never does."""


class Nemesis:
    """The source of a run's troubles: it counts calls and points, and acts where the scenario has a strike or a deed.

    `points` has every point that was passed, with its true time. `next_faults` are used before the scenario's strikes.
    """

    def __init__(self, scenario: Scenario, clock: LaptopClock, do: Callable[[Deed], None]) -> None:
        self.scenario = scenario
        self._faults = {(strike.verb, strike.nth): strike.fault for strike in scenario.strikes}
        self._deeds = {deed.at: deed for deed in scenario.deeds}
        self._weather = list(scenario.weather)
        self._clock = clock
        self._do = do
        self._calls: Counter[str] = Counter()
        self._resting = False
        self.next_faults: dict[str, list[Fault]] = {}
        self.points: list[tuple[float, str]] = []

    def fault(self, verb: str) -> Fault:
        """Return the fault of the next call of a verb, and count the call."""
        self._calls[verb] += 1
        if self.weather("revoked"):
            return Fault.REVOKED
        if self.next_faults.get(verb):
            return self.next_faults[verb].pop(0)
        return self._faults.get((verb, self._calls[verb]), Fault.NONE)

    def kill_after(self, points: int) -> None:
        """Let the supervisor die after this many more points, in place of all other deeds."""
        at = len(self.points) + points
        self._deeds = {at: Deed(at, "kill")}

    def storm(self, weather: Weather) -> None:
        """Add bad weather that the scenario does not contain."""
        self._weather.append(weather)

    def weather(self, kind: str) -> bool:
        """Return whether weather of this kind prevails now."""
        now = self._clock.true.monotonic()
        return any(spell.kind == kind and spell.start_s <= now < spell.end_s for spell in self._weather)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Count no points within the block: another process acts there."""
        before, self._resting = self._resting, True
        try:
            yield
        finally:
            self._resting = before

    def passing(self, place: str) -> None:
        """Record a point, and do the deed that is due there.

        Points lie around every record and every call that leaves the process; at each of them a process may die.
        """
        if self._resting:
            return
        self.points.append((self._clock.true.monotonic(), place))
        if len(self.points) > MOST_POINTS:
            raise Endless(place)
        deed = self._deeds.get(len(self.points))
        if deed is None:
            return
        with self.resting():
            self._do(deed)
        if deed.what in ("kill", "kill and reboot"):
            raise Killed(place)
