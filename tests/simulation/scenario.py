"""What a simulated run is made of: a plan, what goes wrong, what the user does, and how it ends. Data, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tests.emulators.fake import Fault

Ending = Literal["resumed", "never returns", "reaped elsewhere"]
Deeds = Literal[
    "stop", "stop now", "destroy", "kill", "kill and reboot", "sleep", "doze", "jump", "reap elsewhere", "reap all",
    "collect", "guard killed", "taken",
]  # fmt: skip


@dataclass(frozen=True)
class Strike:
    """The nth call of a verb goes wrong in this way."""

    verb: str
    nth: int
    fault: Fault


@dataclass(frozen=True)
class Deed:
    """At the nth point that the run passes, this is done; `amount`: seconds of sleep, of being off, or of a jump."""

    at: int
    what: Deeds
    amount: float = 0.0


@dataclass(frozen=True)
class Weather:
    """From one true second to another the cloud is silent or refuses every end, the key is dead or the line is down.

    Or it denies what has answered.
    """

    kind: Literal["silent", "ends refused", "revoked", "line down", "denied"]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Scenario:
    """One simulated run, whole: the same scenario always gives the same history; the cap pays for `machines`.

    What runs is a `job` of that kind. A list takes `list_s`. With `damaged` a file of the latest checkpoint arrives
    with another digest until somebody collects by hand. With `legs` it may continue on so many machines.
    """

    seed: int
    profiles: tuple[str, ...]
    train_s: float = 20.0
    strikes: tuple[Strike, ...] = ()
    deeds: tuple[Deed, ...] = ()
    weather: tuple[Weather, ...] = ()
    ending: Ending = "resumed"
    machines: int = 1
    damaged: bool = False
    list_s: float = 0.0
    legs: int = 0
    job: Literal["trainer", "sweep", "dev_box"] = "trainer"

    def smaller(self) -> Iterator[Scenario]:
        """Every scenario with one thing less."""
        for name in ("weather", "strikes", "deeds"):
            have = getattr(self, name)
            for place in range(len(have)):
                yield replace(self, **{name: have[:place] + have[place + 1 :]})
        if len(self.profiles) > 1:
            yield replace(self, profiles=self.profiles[:1])
        if self.ending != "resumed":
            yield replace(self, ending="resumed")
        if self.machines > 1:
            yield replace(self, machines=1)
        if self.damaged:
            yield replace(self, damaged=False)
        if self.list_s:
            yield replace(self, list_s=0.0)
        if self.job != "trainer":
            yield replace(self, job="trainer")

    def plus(self, *more: Strike | Deed | Weather) -> Scenario:
        """The scenario, grown."""
        return replace(
            self,
            strikes=(*self.strikes, *(part for part in more if isinstance(part, Strike))),
            deeds=(*self.deeds, *(part for part in more if isinstance(part, Deed))),
            weather=(*self.weather, *(part for part in more if isinstance(part, Weather))),
        )

    def times_of(self, kind: str) -> list[tuple[float, float]]:
        """When the weather is bad in this way."""
        return [(spell.start_s, spell.end_s) for spell in self.weather if spell.kind == kind]

    def has(self, *kinds: str) -> bool:
        """Whether any of these faults, deeds or weathers is in it."""
        named = {*(s.fault for s in self.strikes), *(d.what for d in self.deeds), *(w.kind for w in self.weather)}
        return bool(named & set(kinds))
