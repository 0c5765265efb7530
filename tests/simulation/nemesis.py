"""Does to a run what its scenario says: faults of calls, bad weather, and people at the wrong moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.emulators.fake import Fault
from tests.simulation.laptop import LaptopClock
from tests.simulation.scenario import Deed, Scenario, Weather

MOST_POINTS = 30_000


class Killed(BaseException):
    """The supervisor dies here, as by SIGKILL: nothing of it runs on."""


class Endless(BaseException):
    """Something is done for ever; no simulation should wait for that."""


class Nemesis:
    """Counts calls and points, and strikes. `points` are all places that were passed; `next_faults` come first."""

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
        """What becomes of the next call of a verb."""
        self._calls[verb] += 1
        if self.weather("revoked"):
            return Fault.REVOKED
        if self.next_faults.get(verb):
            return self.next_faults[verb].pop(0)
        return self._faults.get((verb, self._calls[verb]), Fault.NONE)

    def kill_after(self, points: int) -> None:
        """The supervisor dies when it has passed so many points more."""
        at = len(self.points) + points
        self._deeds = {at: Deed(at, "kill")}

    def storm(self, weather: Weather) -> None:
        """Bad weather that nobody had foreseen."""
        self._weather.append(weather)

    def weather(self, kind: str) -> bool:
        """Whether it is bad in this way now."""
        now = self._clock.true.monotonic()
        return any(spell.kind == kind and spell.start_s <= now < spell.end_s for spell in self._weather)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """What others do meanwhile is not a point of this run."""
        before, self._resting = self._resting, True
        try:
            yield
        finally:
            self._resting = before

    def passing(self, place: str) -> None:
        """A point at which a process may die: around every record and every call that leaves it."""
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
