"""The promise, whole: rent, train, bring home, destroy, prove; the cloud's own meter is the judge.

Real commands, real sshd, real training on the CPU; only the clouds are emulated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.core.money import usd
from tests.clouds.rented import CLOUDS, User, kill_supervisors
from tests.emulators import guests

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot")]


@pytest.fixture(params=sorted(CLOUDS))
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[User]:
    with CLOUDS[request.param](tmp_path / "cloud") as cloud:
        somebody = User(cloud, tmp_path / "home")
        yield somebody
        kill_supervisors(somebody.home)


def test_a_run_ends_trained_collected_destroyed_proven_and_paid_within_the_cap(user: User) -> None:
    done = user.trains()
    assert done.returncode == 0, done.stderr + user.said()
    assert user.cloud.alive() == []

    folder = user.home / "runs" / "fox-41"
    told = user.tells("receipt", "fox-41")[1]["data"]["statement"]["predicate"]
    bound = told["cost"]["upper_bound_micros"]
    assert user.cloud.meter.total_micros() <= bound <= usd(5)
    assert told["cost"]["cap_kept"] is True
    assert told["teardown"]["is"] == "destroyed"
    assert told["verdict"]["is"] == "smoke"
    assert list((folder / "artifacts").rglob("*.safetensors"))
    assert not (folder / "ssh" / "client").exists()

    code, audit = user.tells("audit")
    assert (code, audit["ok"]) == (0, True), json.dumps(audit)
    code, reaped = user.tells("reap", "--exit-code")
    assert (code, reaped["data"]["found"], reaped["data"]["leftovers"]) == (0, [], [])


def test_no_key_of_the_cloud_is_in_any_byte_that_was_written(user: User) -> None:
    done = user.trains("--set", "train.steps=2", "--set", "train.checkpoint_every=2")
    assert done.returncode == 0, done.stderr + user.said()
    secrets = [value.encode() for name, value in user.cloud.environment.items() if "KEY" in name]
    written = [done.stdout.encode(), done.stderr.encode()]
    written += [path.read_bytes() for path in user.home.rglob("*") if path.is_file()]
    assert secrets
    assert not [secret for secret in secrets for content in written if secret in content]


def test_stop_in_mid_training_saves_collects_and_destroys(user: User) -> None:
    started = user.trains("--set", "train.steps=100000", "--detach")
    assert started.returncode == 8, started.stderr
    code, _ = user.tells("stop", "fox-41")
    assert code == 0, user.said()
    assert user.cloud.alive() == []
    journal = (user.home / "runs" / "fox-41" / "journal.jsonl").read_text().splitlines()
    closed = json.loads(journal[-1])
    assert closed["event"] == "run.closed"
