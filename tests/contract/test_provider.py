"""The one contract that every provider is held to, against real processes for `local`."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.model import GpuNeed, Instance, InstanceState, Order
from gpurun.core.paths import Home
from gpurun.providers.base import Provider, Rejected
from gpurun.providers.processes import MARK, kill_all, processes_of
from gpurun.providers.registry import PROVIDERS, open_provider

CLOCK = SystemClock()
NEED = GpuNeed(count=0, name="cpu")


@pytest.fixture(params=sorted(PROVIDERS))
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Provider]:
    made = open_provider(request.param, Home(tmp_path), CLOCK)
    yield made
    for instance in made.find(None):
        kill_all(instance.token)


# A mark is seen on the whole machine, by tests that run beside this one too.
TOKEN = f"gr-fox-41-{secrets.token_hex(4)}"


def order(provider: Provider, token: str = TOKEN, lease_s: float = 60.0) -> Order:
    offer = provider.offers(NEED)[0]
    return Order(run="fox-41", token=token, attempt=1, offer=offer, deadline_wall=CLOCK.wall() + lease_s)


def wait_for(provider: Provider, instance: Instance, state: InstanceState) -> Instance:
    for _ in ticks(CLOCK, 0.02, 10):
        seen = provider.read(instance.id)
        if seen.state is state:
            return seen
    raise AssertionError(f"{instance.id} is {seen.state}, not {state}")


def test_verify_names_the_account(provider: Provider) -> None:
    assert provider.verify().identity


def test_offers_are_read_only_and_carry_what_a_plan_needs(provider: Provider) -> None:
    offer = provider.offers(NEED)[0]
    assert offer.provider == provider.name
    assert offer.billing_unit_s >= 1
    assert provider.find(None) == []


def test_a_created_instance_is_found_by_its_token_with_its_run_and_deadline(provider: Provider) -> None:
    asked = order(provider)
    created = provider.create(asked)
    running = wait_for(provider, created, InstanceState.RUNNING)
    (found,) = provider.find(asked.token)
    assert found.id == created.id == running.id
    assert (found.token, found.run, found.deadline_wall) == (asked.token, "fox-41", asked.deadline_wall)
    assert found.address is not None
    assert [one.id for one in provider.find(None)] == [created.id]


def test_another_token_finds_nothing(provider: Provider) -> None:
    provider.create(order(provider))
    assert provider.find("gr-fox-41-00000000") == []


def test_the_same_token_twice_makes_one_instance(provider: Provider) -> None:
    first, second = provider.create(order(provider)), provider.create(order(provider))
    assert first.id == second.id
    assert len(provider.find(order(provider).token)) == 1


def test_what_was_never_made_is_gone(provider: Provider) -> None:
    assert provider.read("gr-never-00000000").state is InstanceState.GONE


def test_destroy_is_idempotent_and_can_be_read_back(provider: Provider) -> None:
    created = provider.create(order(provider))
    provider.destroy(created.id)
    provider.destroy(created.id)
    wait_for(provider, created, InstanceState.GONE)
    assert provider.find(created.token) == []


def test_the_deadline_ends_it_without_anybody(provider: Provider) -> None:
    created = provider.create(order(provider, lease_s=1.0))
    worker = marked_process(created.token)
    for _ in ticks(CLOCK, 0.05, 10):
        if worker.poll() is not None and provider.read(created.id).state is not InstanceState.RUNNING:
            return
    raise AssertionError("the instance outlived its deadline")


def marked_process(token: str) -> subprocess.Popen[bytes]:
    """A process of the instance in a session of its own that ignores every polite signal, as a stuck trainer might."""
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", program], env={**os.environ, MARK: token}, start_new_session=True)


def test_local_destroy_kills_processes_that_left_the_session(tmp_path: Path) -> None:
    local = open_provider("local", Home(tmp_path), CLOCK)
    created = local.create(order(local))
    workers = [marked_process(created.token) for _ in range(3)]
    local.destroy(created.id)
    assert [worker.wait(5) for worker in workers] == [-signal.SIGKILL] * 3
    assert processes_of(created.token) == []


def test_local_instance_whose_guard_died_is_not_called_running(tmp_path: Path) -> None:
    local = open_provider("local", Home(tmp_path), CLOCK)
    created = local.create(order(local))
    kill_all(created.token)
    wait_for(local, created, InstanceState.STOPPED)
    assert [one.id for one in local.find(None)] == [created.id]


def test_local_never_turns_a_strange_id_into_a_path(tmp_path: Path) -> None:
    local = open_provider("local", Home(tmp_path), CLOCK)
    for strange in ("../../etc", "gr-../x", "", "gr-a/b"):
        with pytest.raises(Rejected):
            local.destroy(strange)
