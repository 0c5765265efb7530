"""Tests of a cloud that denies a machine: one that lives, one that never existed, one that ended at its launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.records import Instance
from gpurun.core.run_plan import Plan
from gpurun.lifecycle.reaper import sweep
from tests.changed_plan import changed_plan
from tests.clouds.every_cloud_in_trouble import Account, Rental, account, rental
from tests.emulators.lambda_cloud.problems import no_instance
from tests.emulators.runpod.problems import Problem

__all__ = ["account", "rental"]

SETTLE_S, PROOF_S = 120.0, 30.0
BY_KEY = "Client.InvalidKMSKey.InvalidState"


def denies(account: Account, is_denied: Callable[[], bool]) -> None:
    """While `is_denied()`, let the cloud list no machine and find none by its id, although they live."""
    world = account.emulator.world
    if account.provider.name == "aws":
        hidden = world.hidden
        world.hidden = lambda instance: is_denied() or hidden(instance)
        return
    listed = world.listed
    world.listed = lambda *args: [] if is_denied() else listed(*args)
    missing = no_instance() if account.provider.name == "lambda" else Problem(404, "pod not found")
    for verb in ("read", "terminate"):
        if hasattr(world, verb):
            setattr(world, verb, _refusing(getattr(world, verb), missing, is_denied))


def _refusing(verb: Callable[..., Any], missing: Exception, is_denied: Callable[[], bool]) -> Callable[..., Any]:
    def refusing(*args: Any) -> Any:
        if is_denied():
            raise missing
        return verb(*args)

    return refusing


def denies_from_the_end_on(account: Account, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Callable[[], None]:
    """Let the cloud deny its machines from the first request to end one.

    It stops after `seconds`, or when the returned function is called.
    """
    begun, over, destroy = list[float](), list[bool](), account.provider.destroy

    def destroying(instance_id: str) -> None:
        begun.append(account.clock.monotonic())
        destroy(instance_id)

    monkeypatch.setattr(account.provider, "destroy", destroying)
    denies(account, lambda: bool(begun) and not over and account.clock.monotonic() - begun[0] < seconds)
    return lambda: over.append(True)


def codes(rental: Rental) -> list[str]:
    return [incident["code"] for incident in rental.all_of(Event.INCIDENT)]


def test_a_machine_denied_for_38_s_is_ended_once_known_again(rental: Rental, monkeypatch: pytest.MonkeyPatch) -> None:
    denies_from_the_end_on(rental.account, monkeypatch, 38.0)
    assert rental.drive() is ExitCode.DONE
    assert dict.fromkeys(codes(rental)) == dict.fromkeys(["death.denied", "machine.back"])
    assert rental.ended()


def test_a_machine_denied_for_good_stays_red_and_reap_ends_it(rental: Rental, monkeypatch: pytest.MonkeyPatch) -> None:
    account = rental.account
    admit = denies_from_the_end_on(account, monkeypatch, 3600.0)
    red = rental.drive()
    assert "SSH" in str(red)
    assert len(account.alive) == 1
    admit()
    monkeypatch.setattr("gpurun.lifecycle.supervisor.open_provider", lambda *_, **__: account.provider)
    fates = sweep([account.provider], rental.home, account.clock, destroy_all=True, older_than_s=0.0, look_only=False)
    assert [machine.fate for machine in fates] == ["destroyed"]
    assert account.alive == []


def test_a_machine_listed_after_its_proven_death_is_ended(rental: Rental, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is also silent over SSH, as if its network were down, and its death therefore counts as proven."""
    account = rental.account
    admit = denies_from_the_end_on(account, monkeypatch, 3600.0)
    rental.far.answers = lambda limit_s: False  # type: ignore[method-assign]
    assert rental.drive() is ExitCode.DONE
    admit()
    assert len(account.alive) == 1
    monkeypatch.setattr("gpurun.lifecycle.supervisor.open_provider", lambda *_, **__: account.provider)
    fates = sweep([account.provider], rental.home, account.clock, destroy_all=False, older_than_s=0.0, look_only=False)
    assert [machine.fate for machine in fates] == ["destroyed"]
    assert account.alive == []
    assert [code for code in codes(rental) if code != "leftover"] == ["create.late", "create.late_gone"]


def after_create(rental: Rental, monkeypatch: pytest.MonkeyPatch, do: Callable[[str], None]) -> None:
    """Call `do` with the name of the first machine once it is created, before gpurun gets the answer."""
    provider, made = rental.account.provider, list[str]()
    create = provider.create

    def creating(order: Any) -> Instance:
        instance = create(order)
        if not made:
            do(instance.id.rpartition("/")[2])
        made.append(instance.id)
        return instance

    monkeypatch.setattr(provider, "create", creating)


def forgets(account: Account, name: str) -> None:
    """Remove a machine from the cloud as if it had never existed."""
    world = account.emulator.world
    account.meter.stop(name)
    if account.provider.name == "aws":
        world._forget(world.instances[name])
        del world.instances[name]
    else:
        del (world.pods if account.provider.name == "runpod" else world.instances)[name]


def ends(account: Account, name: str) -> None:
    """End a machine at its launch; the cloud still lists it, as ended."""
    world = account.emulator.world
    if account.provider.name == "aws":
        world.end(name, BY_KEY)
        return
    world.terminated_s = 3600.0
    account.provider.destroy(name)


def capped_at(rental: Rental, dollars: str) -> None:
    made = Plan.from_json(rental.folder.plan.read_bytes())
    rental.folder.plan.write_text(changed_plan(made, {"cap_micros": usd(dollars)}).to_json())


def test_an_id_that_never_existed_is_given_up_after_settling(rental: Rental, monkeypatch: pytest.MonkeyPatch) -> None:
    account = rental.account
    begun = account.clock.monotonic()
    after_create(rental, monkeypatch, lambda name: forgets(account, name))
    assert rental.drive() is ExitCode.NO_OFFER
    assert account.clock.monotonic() - begun <= SETTLE_S + PROOF_S + 60.0
    (failed,) = rental.all_of(Event.STEP_FAILED)
    assert failed["code"] == "boot.gone"
    assert len(rental.all_of(Event.CREATE_INTENDED)) == 1
    assert rental.ended()


def test_where_the_cap_pays_for_both_the_next_region_is_taken(rental: Rental, monkeypatch: pytest.MonkeyPatch) -> None:
    account = rental.account
    capped_at(rental, "10")
    after_create(rental, monkeypatch, lambda name: forgets(account, name))
    assert rental.drive() is ExitCode.DONE
    assert [data["offer"]["region"] for data in rental.all_of(Event.CREATE_INTENDED)] == list(account.regions)
    assert rental.ended()


def test_an_end_at_launch_is_passed_over_in_the_clouds_words(rental: Rental, monkeypatch: pytest.MonkeyPatch) -> None:
    account = rental.account
    capped_at(rental, "6")
    after_create(rental, monkeypatch, lambda name: ends(account, name))
    assert rental.drive() is ExitCode.DONE
    assert [data["offer"]["region"] for data in rental.all_of(Event.CREATE_INTENDED)] == list(account.regions)
    (message,) = [incident["message"] for incident in rental.all_of(Event.INCIDENT) if incident["code"] == "boot.gone"]
    assert (BY_KEY if account.provider.name == "aws" else "erminated") in message.replace("TERMINATED", "terminated")
    assert rental.ended()
