"""The data of a simulated run: its plan, what goes wrong, what people do, and how it ends."""

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
    """A fault of the nth call of a verb."""

    verb: str
    nth: int
    fault: Fault


@dataclass(frozen=True)
class Deed:
    """Something that a person, the laptop or the cloud does when the run passes its nth point.

    `amount`: for how many seconds the laptop sleeps or is off, or by how many its clock jumps.
    """

    at: int
    what: Deeds
    amount: float = 0.0


@dataclass(frozen=True)
class Weather:
    """A spell of bad conditions between two moments of true time.

    The cloud is silent, refuses to end machines or denies machines that have answered before; or the key is revoked; or
    the line to every machine is down.
    """

    kind: Literal["silent", "ends refused", "revoked", "line down", "denied"]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Scenario:
    """One simulated run; the same scenario always gives the same history.

    The cap pays for exactly `machines` machines. `list_s`: how long a provider takes to list its machines. With
    `damaged` a file of the latest checkpoint arrives with a wrong digest until a deed collects the files by hand. With
    `legs` the run may use up to that many machines, one after another.
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
        """Yield every scenario that has one complication less."""
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
        """Return the scenario with more strikes, deeds or weather."""
        return replace(
            self,
            strikes=(*self.strikes, *(part for part in more if isinstance(part, Strike))),
            deeds=(*self.deeds, *(part for part in more if isinstance(part, Deed))),
            weather=(*self.weather, *(part for part in more if isinstance(part, Weather))),
        )

    def times_of(self, kind: str) -> list[tuple[float, float]]:
        """Return the start and the end of each spell of this kind of weather, in true seconds."""
        return [(spell.start_s, spell.end_s) for spell in self.weather if spell.kind == kind]

    def has(self, *kinds: str) -> bool:
        """Return whether the scenario contains a fault, deed or weather of one of these kinds."""
        named = {*(s.fault for s in self.strikes), *(d.what for d in self.deeds), *(w.kind for w in self.weather)}
        return bool(named & set(kinds))
