"""Test that a machine ends itself by its own timer on a request over SSH, for when the cloud refuses to end it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.run_plan import Plan
from gpurun.ledger.journal import read_journal
from gpurun.ledger.run_state import replay_journal
from gpurun.lifecycle.connect import MachineConnector
from gpurun.providers.base import Guarded
from gpurun.providers.registry import open_provider
from gpurun.remote.interface import MachineLost
from tests.clouds.rented import CLOUDS, User, kill_supervisors, somebody
from tests.emulators import guests

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot")]


@pytest.fixture(params=sorted(CLOUDS))
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[User]:
    with CLOUDS[request.param](tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        yield user


def test_a_machine_ends_itself_on_request_without_its_cloud(user: User) -> None:
    started = user.trains("--set", "train.steps=100000", "--detach")
    assert started.returncode == 0, started.stderr
    assert any(Event.TRAIN_STARTED in user.events() for _ in ticks(SystemClock(), 0.1, 120)), user.said()
    kill_supervisors(user.home)
    home, clock = Home(user.home), SystemClock()
    folder = home.run("fox-41")
    plan = Plan.from_json(folder.plan.read_bytes())
    instance = replay_journal("fox-41", read_journal(folder.journal).records).instance
    assert instance is not None
    with patch.dict(os.environ, user.cloud.environment):
        provider = open_provider(user.cloud.name, home, clock, plan.choices)
    assert isinstance(provider, Guarded)
    assert user.cloud.alive()
    with contextlib.suppress(MachineLost):  # It may be gone before it has answered.
        ended = MachineConnector(folder, plan, clock)(instance).end(provider.guard_folder(instance))
        assert ended.taken, ended
    assert any(not user.cloud.alive() for _ in ticks(clock, 0.1, 60)), user.said()
