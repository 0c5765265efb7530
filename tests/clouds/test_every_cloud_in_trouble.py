"""Tests of what can go wrong between a machine's request and its proof of death, on each cloud, in virtual time.

The real provider calls the emulated cloud, and the real driver decides. Only the agent and the trainer are scripted.
The cloud's own meter shows the true cost.
"""

from __future__ import annotations

from typing import Any

import pytest

from gpurun.core.errors import ExitCode, MayBeBilling
from gpurun.core.journal_records import Event
from gpurun.core.records import Instance
from tests.clouds import every_cloud_in_trouble
from tests.clouds.every_cloud_in_trouble import (
    Rental,
)
from tests.lifecycle.scripted_cloud import LEASE, Killed

account = every_cloud_in_trouble.account
rental = every_cloud_in_trouble.rental


def test_a_quiet_rental_is_the_measure_of_all_others(rental: Rental) -> None:
    assert rental.drive() is ExitCode.DONE
    assert rental.ended()


@pytest.mark.parametrize("hidden_s", [0.0, 60.0])
@pytest.mark.parametrize("how", ["lost", "ERROR_AFTER"])
def test_a_create_done_but_unanswered_is_adopted_not_repeated(rental: Rental, how: str, hidden_s: float) -> None:
    account = rental.account
    account.hide(hidden_s)
    account.fail("create", account.lost if how == "lost" else account.faults[how])
    assert rental.drive() is ExitCode.DONE
    assert account.made == 1
    # AWS makes one machine for a repeated request; at the other clouds gpurun finds the machine in the list.
    assert rental.all_of(Event.CREATE_OBSERVED)[0]["adopted"] is (account.provider.name != "aws")
    assert rental.ended()


def test_killed_between_send_and_record_adopts_the_same_machine(
    rental: Rental, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = rental.account.provider
    create = provider.create

    def dies(order: Any) -> Instance:
        create(order)
        raise Killed

    monkeypatch.setattr(provider, "create", dies)
    assert rental.drive() == "killed"
    monkeypatch.undo()
    assert rental.drive() is ExitCode.DONE
    assert rental.account.made == 1
    assert rental.ended()


def test_a_duplicate_machine_ends_before_anything_is_shipped(rental: Rental) -> None:
    account = rental.account
    if account.provider.name == "aws":
        return  # AWS makes one machine for any number of creates with one client token.
    alive: set[int] = set()
    rental.far.during = lambda: alive.add(len(account.alive))
    account.fail("create", account.faults.TWICE)
    assert rental.drive() is ExitCode.DONE
    assert alive == {1}
    codes = [incident["code"] for incident in rental.all_of(Event.INCIDENT)]
    assert codes == ["create.duplicate", "create.duplicate_gone"]
    assert rental.ended()


@pytest.mark.parametrize("verb", ["create", "list", "read", "destroy"])
def test_being_told_to_wait_again_and_again_unwinds_nothing(rental: Rental, verb: str) -> None:
    account = rental.account
    account.fail(verb, *[account.throttled] * 6)
    assert rental.drive() is ExitCode.DONE
    assert rental.ended()


def test_a_sold_out_region_gives_way_to_the_next_under_the_cap(rental: Rental) -> None:
    account = rental.account
    account.full()
    assert rental.drive() is ExitCode.DONE
    intents = rental.all_of(Event.CREATE_INTENDED)
    assert [intent["offer"]["region"] for intent in intents] == list(account.regions)
    assert len({intent["token"] for intent in intents}) == 2
    assert rental.ended()


def test_a_machine_that_boots_slower_than_planned_is_still_used(rental: Rental) -> None:
    account = rental.account
    slow = {"runpod": "start_s", "lambda": "boot_s", "aws": "pending_s"}[account.provider.name]
    setattr(account.emulator.world, slow, 1.5 * LEASE.boot_s)
    assert rental.drive() is ExitCode.DONE
    (ready,) = rental.all_of(Event.READY_OBSERVED)
    assert ready["seconds"] > LEASE.boot_s
    assert rental.ended()


def test_a_machine_that_never_boots_is_given_up_and_ended(rental: Rental) -> None:
    account = rental.account
    account.emulator.world.never_boots = True
    assert rental.drive() is ExitCode.NO_OFFER
    assert not rental.all_of(Event.SHIP_INTENDED)
    assert rental.ended()


def test_an_end_that_was_granted_but_did_not_happen_is_repeated(rental: Rental) -> None:
    rental.account.lies()
    assert rental.drive() is ExitCode.DONE
    assert len(rental.all_of(Event.DESTROY_ASKED)) == 2
    assert rental.ended()


def test_a_key_revoked_in_mid_run_leaves_the_run_red_until_back(rental: Rental) -> None:
    account = rental.account
    rental.far.during = lambda: account.revoke(True)
    red = rental.drive()
    assert isinstance(red, MayBeBilling)
    assert len(account.alive) == 1
    (made,) = rental.all_of(Event.CREATE_OBSERVED)
    assert made["instance"]["id"] in red.what
    assert "https://" in red.hint
    assert "gpurun destroy fox-41" in red.hint
    assert not rental.folder.receipt.exists()
    account.revoke(False)
    assert rental.drive() is ExitCode.DONE
    assert rental.ended()
