"""Tests that four attacks on the cap fail on each cloud with real machines, and that gpurun reports each truthfully.

Supervisors, machines and their timers are real processes; a test changes the cloud's answers while they work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.credentials import file_of
from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.paths import Home, make_private, write_atomic
from gpurun.ledger.journal import read_journal
from tests.clouds.rented import CLOUDS, Cloud, User, kill_supervisors, somebody
from tests.emulators import guests, lambda_cloud, runpod
from tests.later import LATER
from tests.refusals import lacking

pytestmark = [
    LATER,
    pytest.mark.slow,
    pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot"),
]

GUARD_KEY = "secret_guard_of_the_same_account"
LAG_S = 40.0
"""Longer than a machine takes to be ready and to begin to train."""
FOREVER = ("--set", "train.steps=100000")


@pytest.fixture(params=sorted(CLOUDS))
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[User]:
    with CLOUDS[request.param](tmp_path / "cloud") as cloud:
        if cloud.name == "lambda":  # With the user's own key, the machine would be refused together with the user.
            cloud.emulator.api_keys.add(GUARD_KEY)
            key = file_of("lambda-guard", Home(tmp_path / "home").prepare())
            make_private(key.parent)
            write_atomic(key, GUARD_KEY.encode())
        with somebody(cloud, tmp_path / "home") as user:
            yield user


def until(true: Callable[[], object], user: User, limit_s: float = 150.0) -> None:
    assert any(true() for _ in ticks(SystemClock(), 0.2, limit_s)), user.said()


def training(user: User) -> None:
    started = user.trains(*FOREVER, "--detach")
    assert started.returncode == 0, started.stderr
    events = user.home / "runs/fox-41/events.jsonl"
    until(lambda: events.exists() and b'"kind":"step"' in events.read_bytes(), user)


def incidents(user: User) -> list[str]:
    records = read_journal(user.home / "runs/fox-41/journal.jsonl").records
    return [str(record.data["code"]) for record in records if record.event is Event.INCIDENT]


def agree(user: User) -> None:
    """Assert that `ps` and `audit` exit with 9, and show that the machine ends itself and its greatest cost."""
    for verb in ("ps", "audit"):
        done = user.types(verb)
        shown = " ".join((done.stdout + done.stderr).split())
        assert (done.returncode, lacking(shown, "its own timer", "at most $")) == (9, []), shown


def revoke(cloud: Cloud, *, now: bool) -> None:
    """Let the cloud refuse the user's key and no other key; with `now=False`, accept it again."""
    match cloud.name:
        case "runpod":
            cloud.emulator.revoked = now
        case "lambda":
            (cloud.emulator.api_keys.discard if now else cloud.emulator.api_keys.add)(lambda_cloud.KEY)
        case _:
            cloud.emulator.rules.valid_key = not now


def forbid(cloud: Cloud, *, now: bool) -> None:
    """Take from the user's key the right to end a machine, and no other right; with `now=False`, give it back."""
    match cloud.name:
        case "runpod":
            cloud.emulator.denied = {"delete"} if now else set()
        case _:
            cloud.emulator.rules.denied = {"ec2:TerminateInstances"} if now else set()


def test_a_second_machine_seen_late_is_ended_within_the_cap(user: User) -> None:
    faults = {"runpod": ("create", runpod.Fault.TWICE), "lambda": ("launch", lambda_cloud.Fault.TWICE)}
    if user.cloud.name not in faults:
        return  # AWS makes one machine for any number of requests with one client token.
    user.cloud.emulator.fail(*faults[user.cloud.name])
    user.cloud.emulator.world.list_lag_s = LAG_S
    training(user)
    assert len(user.cloud.alive()) == 2
    until(lambda: "create.duplicate_gone" in incidents(user), user, 240)
    assert len(user.cloud.alive()) == 1
    assert user.types("stop", "fox-41").returncode == 0, user.said()
    over(user)


@pytest.mark.parametrize("attack", [revoke, forbid])
def test_a_dead_key_costs_no_more_than_the_machines_own_end(user: User, attack: Callable[..., None]) -> None:
    if attack is forbid and user.cloud.name == "lambda":
        return  # A key of Lambda allows everything or nothing.
    training(user)
    attack(user.cloud, now=True)
    stopped = user.types("stop", "fox-41", timeout_s=400)
    # With `forbid`, the user can still read that the machine is gone.
    assert stopped.returncode == (9 if attack is revoke else 0), stopped.stdout + stopped.stderr
    until(lambda: not user.cloud.alive(), user)
    assert list((user.home / "runs/fox-41/artifacts").rglob("*.safetensors")), "its checkpoints came home first"
    assert "machine.ends_itself" in incidents(user)
    if attack is revoke:
        agree(user)
        attack(user.cloud, now=False)
        assert user.types("resume", "fox-41", timeout_s=400).returncode == 0, user.said()
    over(user)


def test_a_client_killed_after_launch_leaves_an_armed_machine(user: User) -> None:
    """The machine's timer ends it without any supervisor; the test only moves the deadline, to save the wait."""
    begun = user.begins(*FOREVER)
    until(lambda: user.cloud.alive(), user)
    kill_supervisors(user.home)
    assert begun.wait(60) == 9
    assert Event.READY_OBSERVED not in user.events()
    until(lambda: timers(user), user)
    (timer,) = timers(user)
    records = read_journal(user.home / "runs/fox-41/journal.jsonl").records
    (deadline_wall,) = [record.data["deadline_wall"] for record in records if record.event is Event.CREATE_INTENDED]
    assert int(timer.read_text().split()[3]) <= deadline_wall + 1
    (timer.parent / "deadline").write_text("1\n")
    until(lambda: not user.cloud.alive(), user)
    assert user.types("resume", "fox-41", timeout_s=400).returncode != 9, user.said()
    over(user)


def timers(user: User) -> list[Path]:
    """Return the files in which the newest machine's timer notes its deadline; empty until it has one."""
    found = user.cloud.guests[-1].root.glob("var/lib/gpurun/**/spent") if user.cloud.guests else ()
    return [path for path in found if len(path.read_text().split()) == 4]


def over(user: User) -> None:
    """Assert that no machine lives, meter <= receipt <= cap, and the audit agrees."""
    assert user.cloud.alive() == []
    code, envelope = user.envelope("audit")
    (row,) = envelope["data"]["rows"]
    assert (code, row["problems"]) == (0, []), envelope
    assert user.cloud.meter.total_micros() <= row["measured_micros"] <= usd(5)
