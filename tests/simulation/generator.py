"""Draw scenarios: mostly a little trouble, sometimes a lot, and never more than gpurun's promises cover.

A scenario stays within what the `Traits` of its clouds state. It has at most two faults that hide a machine or show an
old state, fewer than the readings of a proof of death; weather denies only machines that have answered. A cloud that
reports no prices charges the agreed one. All bad weather is over within an hour.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.emulators.fake import PROFILES, Fault
from tests.simulation.scenario import Deed, Deeds, Scenario, Strike, Weather

_ANY = (Fault.DROPPED, Fault.BUSY, Fault.REVOKED, Fault.BROKEN)
_LOOK = (*_ANY, Fault.STALE, Fault.DENIED)
FAULTS: dict[str, tuple[Fault, ...]] = {
    "create": (
        *_ANY, Fault.FULL, Fault.FULL, Fault.REFUSED, Fault.LATE, Fault.LOST, Fault.LOST, Fault.REVOKED_AFTER,
        Fault.OF_ANOTHER, Fault.TWICE, Fault.DEARER, Fault.OTHER_GPU, Fault.NO_TIMER, Fault.STILLBORN, Fault.NOWHERE,
    ),
    "find": _LOOK,
    "read": _LOOK,
    "destroy": (*_ANY, Fault.DEAF, Fault.DEAF, Fault.LOST),
    "leftovers": _LOOK,
    "remove": (*_ANY, Fault.DEAF, Fault.LOST),
}  # fmt: skip
_MOST_LIES, DENIED_S = 2, 38.0
_DEEDS: tuple[Deeds, ...] = (
    "stop", "stop now", "destroy", "kill", "kill", "kill", "kill and reboot", "sleep", "doze", "jump",
    "reap elsewhere", "reap all", "guard killed", "taken",
)  # fmt: skip
_NAPS_S = (30.0, 300.0, 1800.0, 4 * 3600.0)
_OFF_S = (0.0, 0.0, 60.0, 1800.0)
_JUMPS_S = (-3600.0, -90.0, 90.0, 3600.0)
# A run passes some 200 points; the first 60 belong to the create request and the boot, where most money is lost.
_POINTS = (12, 60, 200)


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    dice = Random(seed)
    names = tuple(dice.choice(list(PROFILES)) for _ in range(dice.choice((1, 1, 1, 2, 3))))
    drawn = Scenario(
        seed=seed,
        profiles=names,
        train_s=dice.choice((5.0, 20.0, 20.0, 60.0, 1e6)),
        strikes=_strikes(dice, names),
        deeds=_deeds(dice),
        weather=_weather(dice),
        ending=dice.choice(("resumed", "resumed", "never returns", "reaped elsewhere")),
        machines=dice.choice((1, 1, 2)),
        list_s=dice.choice((0.0, 0.0, 0.0, 40.0)),
    )
    drawn = _damaged(drawn, dice) if dice.random() < 0.3 else drawn
    return replace(drawn, job="dev_box" if dice.random() < 0.2 else "trainer")


def draw_voyage(seed: int) -> Scenario:
    """Return the scenario of a run that continues on other machines.

    Its machines are taken away at random moments, besides the other troubles.
    """
    dice = Random(f"voyage {seed}")
    names = tuple(dice.choice(list(PROFILES)) for _ in range(dice.choice((1, 1, 2, 3))))
    takings = {at: Deed(at, "taken") for at in (dice.randint(1, 700) for _ in range(dice.choice((0, 1, 2, 3, 4))))}
    others = {deed.at: deed for deed in _deeds(dice)} if dice.random() < 0.5 else {}
    deeds = {**others, **takings}
    return Scenario(
        seed=seed,
        profiles=names,
        train_s=dice.choice((60.0, 120.0, 240.0)),
        strikes=_strikes(dice, names) if dice.random() < 0.5 else (),
        deeds=tuple(sorted(deeds.values(), key=lambda deed: deed.at)),
        weather=_weather(dice) if dice.random() < 0.3 else (),
        ending=dice.choice(("resumed", "resumed", "resumed", "never returns", "reaped elsewhere")),
        machines=dice.choice((1, 2, 3, 5)),
        legs=dice.choice((2, 3, 5, 5)),
    )


def _damaged(drawn: Scenario, dice: Random) -> Scenario:
    """Return the scenario with a file that arrives damaged, so that the machine is held.

    In about half of the cases a deed collects the files by hand.
    """
    spoiled, at = replace(drawn, damaged=True), dice.randint(60, 250)
    is_collected = dice.random() < 0.5 and at not in {deed.at for deed in drawn.deeds}
    return spoiled.plus(Deed(at, "collect")) if is_collected else spoiled


def _strikes(dice: Random, names: tuple[str, ...]) -> tuple[Strike, ...]:
    strikes: dict[tuple[str, int], Strike] = {}
    lies = 0
    for _ in range(dice.choice((0, 1, 1, 2, 4, 8))):
        verb = dice.choice(("create", "create", "find", "read", "destroy", "destroy", "leftovers", "remove"))
        fault, nth = dice.choice(FAULTS[verb]), dice.choice((1, 1, 2, 3, dice.randint(1, 25)))
        lies += fault in (Fault.DENIED, Fault.STALE)
        secretly_dearer = fault is Fault.DEARER and not all(PROFILES[name].tells_rate for name in names)
        if lies > _MOST_LIES or secretly_dearer:
            continue
        strikes.setdefault((verb, nth), Strike(verb, nth, fault))
    return tuple(strikes.values())


def _deeds(dice: Random) -> tuple[Deed, ...]:
    deeds: dict[int, Deed] = {}
    for _ in range(dice.choice((0, 0, 1, 1, 2, 3))):
        what, at = dice.choice(_DEEDS), dice.randint(1, dice.choice(_POINTS))
        amount = dice.choice({"jump": _JUMPS_S, "kill": _OFF_S, "kill and reboot": _OFF_S}.get(what, _NAPS_S))
        deeds.setdefault(at, Deed(at, what, amount))
    if {"doze", "kill and reboot"} & {deed.what for deed in deeds.values()}:
        # If the monotonic clock misses time and the wall clock is set back, no program can know the true time.
        deeds = {at: deed for at, deed in deeds.items() if deed.what != "jump" or deed.amount > 0}
    return tuple(sorted(deeds.values(), key=lambda deed: deed.at))


def _weather(dice: Random) -> tuple[Weather, ...]:
    found = list[Weather]()
    for _ in range(dice.choice((0, 0, 0, 1, 1, 2))):
        start_s, long_s = dice.uniform(0, 400), dice.choice((20.0, 120.0, 700.0, 2400.0))
        kind = dice.choice(("silent", "ends refused", "revoked", "line down", "denied", "denied"))
        long_s = DENIED_S if kind == "denied" else long_s
        found.append(Weather(kind, start_s, start_s + long_s))
    if {"denied", "line down"} <= {spell.kind for spell in found}:  # Nothing could disprove the denial then.
        found = [spell for spell in found if spell.kind != "denied"]
    return tuple(found)
