"""Tests of a whole rental: rent, train, download, destroy and prove, with the cost checked by the cloud's own meter.

Commands, sshd and training (on the CPU) are real; only the clouds are emulated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from subprocess import CompletedProcess

import pytest

from gpurun.core.money import usd
from tests.clouds.rented import CLOUDS, User, somebody
from tests.emulators import guests

pytestmark = pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot")


EVERY_DAY = "runpod"  # The other clouds run only in `make full`.
ALL = [
    pytest.param(name, marks=[pytest.mark.xdist_group(f"rental on {name}")] + [pytest.mark.slow] * (name != EVERY_DAY))
    for name in sorted(CLOUDS)
]
Done = CompletedProcess[str]


@pytest.fixture(scope="module", params=ALL)
def user(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("rental")
    with CLOUDS[request.param](folder / "cloud") as cloud, somebody(cloud, folder / "home") as user:
        yield user


@pytest.fixture(scope="module")
def done(user: User) -> Done:
    """Return the result of a `gpurun train` command that has succeeded."""
    done = user.trains()
    assert done.returncode == 0, done.stderr + user.said()
    return done


def test_a_run_trains_comes_home_is_proven_gone_and_in_the_cap(user: User, done: Done) -> None:
    assert user.cloud.alive() == []
    folder = user.home / "runs" / "fox-41"
    receipt = user.envelope("receipt", "fox-41")[1]["data"]["statement"]["predicate"]
    bound = receipt["cost"]["upper_bound_micros"]
    assert user.cloud.meter.total_micros() <= bound <= usd(5)
    assert receipt["cost"]["cap_kept"] is True
    assert receipt["teardown"]["is"] == "destroyed"
    assert receipt["verdict"]["is"] == "not a provider", "an emulator is none, and no receipt says otherwise"
    assert list((folder / "artifacts").rglob("*.safetensors"))
    assert not (folder / "ssh" / "client").exists()

    code, audit = user.envelope("audit", "--against-bill")
    assert (code, audit["ok"]) == (0, True), json.dumps(audit)
    (row,) = audit["data"]["rows"]
    if user.cloud.name == "runpod":
        assert 0 < row["billed_micros"] <= row["measured_micros"]
    else:
        (unclear,) = row["billed_unclear"]
        assert user.cloud.name in unclear
    code, reaped = user.envelope("reap", "--exit-code")
    assert (code, reaped["data"]["found"], reaped["data"]["leftovers"]) == (0, [], [])


def test_no_key_of_the_cloud_is_in_any_byte_that_was_written(user: User, done: Done) -> None:
    secrets = [value.encode() for name, value in user.cloud.environment.items() if "KEY" in name]
    written = [done.stdout.encode(), done.stderr.encode()]
    written += [path.read_bytes() for path in user.home.rglob("*") if path.is_file()]
    assert secrets
    assert not [secret for secret in secrets for content in written if secret in content]


@pytest.mark.slow
def test_stop_in_mid_training_saves_collects_and_destroys(user: User, done: Done) -> None:
    started = user.trains("--set", "train.steps=100000", "--detach", name="owl-7")
    assert started.returncode == 0, started.stderr
    code, _ = user.envelope("stop", "owl-7")
    assert code == 0, user.said("owl-7")
    assert user.cloud.alive() == []
    journal = (user.home / "runs" / "owl-7" / "journal.jsonl").read_text().splitlines()
    closed = json.loads(journal[-1])
    assert closed["event"] == "run.closed"
    # With a second run on the same account and home, each run has its own receipt.
    assert user.envelope("audit")[0] == 0
