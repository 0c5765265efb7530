"""Tests of the contract that every provider keeps: with real processes for `local`, with emulators for the clouds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from gpurun.core.clock import ticks
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import InstanceState
from gpurun.planning.own_box import LoginHere
from gpurun.providers.base import LeavesThings, Provider
from gpurun.providers.catalog import offers_for, rows_for
from gpurun.providers.processes import kill_instance
from gpurun.providers.registry import PROVIDERS, open_provider
from gpurun.providers.slurm.provider import Site, SlurmProvider
from gpurun.providers.ssh import SshBox, SshProvider
from tests.contract.clouds import CLOUDS, case
from tests.contract.orders import CLOCK, NEED, TOKEN, order, wait_for
from tests.emulators.slurm import missing, scripted_slurm
from tests.emulators.slurm.engine import running
from tests.later import LATER


@contextmanager
def _local(folder: Path) -> Iterator[Provider]:
    made = open_provider("local", Home(folder), CLOCK)
    yield made
    for instance in made.find(None):
        kill_instance(instance.token)


@contextmanager
def _ssh(folder: Path) -> Iterator[Provider]:
    yield SshProvider(Home(folder), CLOCK, SshBox("127.0.0.1", 22, "root", usd(0), NEED))


@contextmanager
def _slurm(folder: Path) -> Iterator[Provider]:
    with scripted_slurm(folder) as slurm:
        yield SlurmProvider([Site(slurm.cluster, LoginHere())], CLOCK)


CASES: dict[str, Callable[[Path], AbstractContextManager[Provider]]] = {
    "local": _local,
    "slurm": _slurm,
    "ssh": _ssh,
    **{name: case(name) for name in CLOUDS},
}


@contextmanager
def _real_slurm(folder: Path) -> Iterator[Provider]:
    with running(folder / "root") as engine:
        yield SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK)


REAL = pytest.param(_real_slurm, id="slurm's own", marks=[LATER, pytest.mark.skipif(bool(missing()), reason=missing())])


@pytest.fixture(params=[*(pytest.param(CASES[name], id=name) for name in sorted(CASES)), REAL])
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Provider]:
    with request.param(tmp_path) as made:
        yield made


def test_every_registered_provider_is_held_to_it() -> None:
    assert set(CASES) == set(PROVIDERS)


def test_verify_names_the_account(provider: Provider) -> None:
    assert provider.verify().identity


def test_offers_are_read_only_and_carry_what_a_plan_needs(provider: Provider) -> None:
    offer = provider.offers(NEED, rows_for(NEED, provider.name) or offers_for(NEED))[0]
    assert offer.provider == provider.name
    assert offer.billing_unit_s >= 1
    assert offer.boot_s > 0
    assert offer.dies_by_itself
    assert provider.find(None) == []


def test_a_created_instance_is_found_by_its_token_with_all_facts(provider: Provider) -> None:
    wanted = order(provider)
    created = provider.create(wanted)
    assert (created.token, created.run) == (wanted.token, "fox-41")
    running = wait_for(provider, created, InstanceState.RUNNING)
    (found,) = provider.find(wanted.token)
    assert found.id == created.id == running.id
    assert (found.token, found.run, found.deadline_wall) == (wanted.token, "fox-41", wanted.deadline_wall)
    assert [instance.id for instance in provider.find(None)] == [created.id]


def test_a_running_instance_is_as_ordered_and_reachable(provider: Provider) -> None:
    wanted = order(provider)
    created = provider.create(wanted)
    for _ in ticks(CLOCK, 0.05, 30):
        seen = provider.read(created.id)
        if seen.state is InstanceState.RUNNING and seen.address is not None:
            break
    assert seen.address is not None
    assert seen.type_id in ("", wanted.offer.type_id)
    assert seen.gpu_count == wanted.offer.gpu_count
    rate = seen.rate_micros_per_hour
    assert rate is None or rate == wanted.offer.rate_micros_per_hour


def test_another_token_finds_nothing(provider: Provider) -> None:
    provider.create(order(provider))
    assert provider.find("gr-fox-41-00000000") == []


def test_what_was_never_made_is_gone(provider: Provider) -> None:
    assert provider.find("gr-never-00000000") == []


def test_destroy_is_idempotent_and_can_be_read_back(provider: Provider) -> None:
    created = provider.create(order(provider))
    wait_for(provider, created, InstanceState.RUNNING)
    provider.destroy(created.id)
    provider.destroy(created.id)
    wait_for(provider, created, InstanceState.GONE)
    assert all(instance.state is InstanceState.GONE for instance in provider.find(created.token))


def test_leftovers_are_found_by_the_token_and_can_be_removed(provider: Provider) -> None:
    if not isinstance(provider, LeavesThings):
        return  # This provider leaves nothing beside its machines.
    created = provider.create(order(provider))
    wait_for(provider, created, InstanceState.RUNNING)
    beside = provider.leftovers(TOKEN)
    assert {leftover.token for leftover in beside} == {TOKEN}
    assert [leftover.id for leftover in provider.leftovers(None)] == [leftover.id for leftover in beside]
    assert provider.leftovers("gr-fox-41-00000000") == []
    provider.destroy(created.id)
    wait_for(provider, created, InstanceState.GONE)
    for leftover in provider.leftovers(TOKEN):
        provider.remove(leftover)
    assert provider.leftovers(TOKEN) == []
