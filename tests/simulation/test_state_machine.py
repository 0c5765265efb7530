"""Tests of user verbs, clock jumps and faults in any order that Hypothesis finds; it makes each failure small.

By default the search is short and always the same; `--hypothesis-profile soak` makes it long and random.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.emulators.fake import PROFILES, Fault
from tests.simulation import checker
from tests.simulation.generator import FAULTS
from tests.simulation.play import PAUSE_S, Stage
from tests.simulation.scenario import Deed, Scenario, Strike, Weather
from tests.simulation.soak import folder_of_one_run

_MOST_LIES = 2
_FAULTS = sorted({(verb, fault) for verb, some in FAULTS.items() for fault in some})
_LIES = (Fault.DENIED, Fault.STALE)


class AnyOrder(RuleBasedStateMachine):
    """One run and its clouds. Each rule is something that a user, the laptop or a cloud does next."""

    def __init__(self) -> None:
        super().__init__()
        self.world = ExitStack()
        self.lies = 0
        self.stage: Stage | None = None

    @initialize(name=st.sampled_from(sorted(PROFILES)), others=st.sampled_from([(), ("runpod",), ("aws", "lambda")]))
    def begin(self, name: str, others: tuple[str, ...]) -> None:
        root = self.world.enter_context(folder_of_one_run())
        self.stage = Stage(Scenario(0, (name, *others)), Path(root))
        self.world.enter_context(self.stage.set_up())

    @property
    def on(self) -> Stage:
        assert self.stage is not None
        return self.stage

    def happened(self, what: Strike | Deed | Weather) -> None:
        """Add the event to the scenario, because the checker excuses breaches by what went wrong."""
        self.on.played.scenario = self.on.played.scenario.plus(what)

    @precondition(lambda self: not self.on.played.closed)
    @rule(points=st.integers(1, 60))
    def supervise_until_killed(self, points: int) -> None:
        self.happened(Deed(0, "kill"))
        self.on.nemesis.kill_after(points)
        self.on.drive()

    @precondition(lambda self: not self.on.played.closed)
    @rule()
    def supervise(self) -> None:
        self.on.nemesis.kill_after(10**9)
        self.on.drive()

    @rule(pair=st.sampled_from(_FAULTS))
    def next_call_fails(self, pair: tuple[str, Fault]) -> None:
        verb, fault = pair
        self.lies += fault in _LIES
        tells = all(PROFILES[name].tells_rate for name in self.on.played.scenario.profiles)
        if (fault in _LIES and self.lies > _MOST_LIES) or (fault is Fault.DEARER and not tells):
            return
        self.happened(Strike(verb, 0, fault))
        self.on.nemesis.next_faults.setdefault(verb, []).append(fault)

    @rule(kind=st.sampled_from(["silent", "revoked", "line down"]), long_s=st.sampled_from([30.0, 600.0, 2400.0]))
    def storm(self, kind: Any, long_s: float) -> None:
        weather = Weather(kind, self.on.true.monotonic(), self.on.true.monotonic() + long_s)
        self.happened(weather)
        self.on.nemesis.storm(weather)
        if kind == "silent":
            for cloud in self.on.played.clouds.values():
                cloud.outages.append((weather.start_s, weather.end_s))

    @rule(what=st.sampled_from(["stop", "stop now", "destroy"]))
    def ask(self, what: Any) -> None:
        self.happened(Deed(0, what))
        self.on.do(Deed(0, what))

    @rule(what=st.sampled_from(["sleep", "reap elsewhere", "reap all"]), amount=st.sampled_from([60.0, 600.0, 7200.0]))
    def meanwhile(self, what: Any, amount: float) -> None:
        self.happened(Deed(0, what, amount))
        with self.on.nemesis.resting():
            self.on.do(Deed(0, what, amount))

    @rule(amount=st.sampled_from([-3600.0, 90.0, 3600.0]))
    def set_the_clock(self, amount: float) -> None:
        self.happened(Deed(0, "jump", amount))
        self.on.do(Deed(0, "jump", amount))

    @invariant()
    def promises_hold(self) -> None:
        """Assert P1 to P5 after every step; the other promises are judged at the end."""
        if self.stage is not None:
            played = self.stage.played
            judges = (checker.intent_first, checker.find_second_machines, checker.nothing_forgotten,
                      checker.death_is_proven, checker.bounded_money)  # fmt: skip
            assert [breach for judge in judges for breach in judge(played)] == []

    def teardown(self) -> None:
        """Assert that a run without further faults ends (promise P9, see checker.py) and that every promise is kept."""
        if self.stage is not None:
            self.on.nemesis.kill_after(10**9)
            self.on.nemesis.next_faults.clear()
            self.on.true.sleep(PAUSE_S)
            self.on.drive_to_the_end()
            breaches = checker.check(self.on.played)
            self.world.close()
            assert breaches == []
        self.world.close()


AnyOrder.TestCase.settings = (
    settings.get_profile("soak")
    if settings.get_current_profile_name() == "soak"
    else settings(
        max_examples=300,
        stateful_step_count=12,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
)
TestAnyOrder = pytest.mark.slow(AnyOrder.TestCase)
