"""Tests that a home with a cloud's keys and no records can reap a run whose supervisor was killed at a random moment.

Real supervisors are killed with SIGKILL, while real machines continue. Only the wait for the deadline is skipped.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices
from gpurun.lifecycle import reaper
from gpurun.lifecycle.reaper import sweep, sweep_leftovers
from gpurun.providers.registry import open_provider
from tests.clouds.rented import CLOUDS, User, kill_supervisors, somebody
from tests.emulators import guests
from tests.later import SOAK

MOMENTS = 10 if SOAK else 1
LONGEST_S = 25.0
LEASE_S = 3600.0

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot")]


class LaterClock(SystemClock):
    """A clock that is an hour ahead and cuts each sleep to at most 0.2 s, in which the cloud can act."""

    def __init__(self) -> None:
        self.ahead_s = LEASE_S

    def wall(self) -> float:
        return super().wall() + self.ahead_s

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.2))
        self.ahead_s += max(0.0, seconds - 0.2)


@pytest.fixture(params=sorted(CLOUDS))
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[User]:
    with CLOUDS[request.param](tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        yield user


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_killed_anywhere_and_reaped_nothing_lives_and_cap_holds(user: User, tmp_path: Path, moment: int) -> None:
    chance = random.Random(f"{user.cloud.name} {moment}")
    begun = user.begins("--set", "train.steps=100000", "--hours", "0.1")
    time.sleep(chance.uniform(0.0, LONGEST_S))
    kill_supervisors(user.home)
    assert begun.wait(60) in (0, 8, 9), "it was ready before; nothing was asked for; or something may be billing"
    reap_later(user, tmp_path / "elsewhere")
    assert user.cloud.alive() == []
    assert user.cloud.meter.total_micros() <= usd(5)


def reap_later(user: User, elsewhere: Path) -> None:
    """Reap twice after the deadline, like a cron job, in a home that knows no run; assert that nothing is left."""
    home, clock = Home(elsewhere).prepare(), LaterClock()
    # The emulated cloud's clock has not skipped the hour, so the reaper must not ask the cloud for the time.
    with (
        patch.dict(os.environ, user.cloud.environment),
        patch.object(reaper, "their_wall", lambda _, clock: clock.wall()),
    ):
        for _ in range(2):
            providers = [open_provider(user.cloud.name, home, clock, Choices())]
            swept = sweep(providers, home, clock, destroy_all=False, older_than_s=0, look_only=False)
            fates = [machine.fate for machine in swept]
            strays = list(sweep_leftovers(providers, home, clock, remove_all=False, look_only=False))
        assert fates == []
        assert strays == []
