"""Tests of a kill between the ledger's receipt and the journal's record of it: the receipt no longer changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event, Phase
from gpurun.core.paths import Home
from gpurun.ledger import write_receipt
from gpurun.ledger.audit import AuditRow, audit
from gpurun.providers.base import Unknown
from tests.emulators.fake import Fault
from tests.lifecycle.faults import receipt_of
from tests.lifecycle.matrix_destroy import beside
from tests.lifecycle.scripted_cloud import Killed, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def killed_after_the_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(place: str) -> None:
        if place == "after ledger.append":
            raise Killed(place)

    with monkeypatch.context() as patch:
        patch.setattr(write_receipt, "crashpoint", dies)
        assert world.drive() == "killed"
    assert world.folder.receipt.exists()
    assert not world.all_of(Event.RECEIPT_OBSERVED)


def row(world: World) -> AuditRow:
    (found,) = audit(world.home).rows
    return found


def late_by_seven_minutes(world: World) -> None:
    """Make the first machine appear after 420 s, when the second one is gone and the receipt is written."""
    world.cloud.script["create"] = [Fault.LATE]
    world.cloud.profile = replace(world.cloud.profile, late_s=420.0)


def test_a_silent_provider_then_is_a_warning_and_not_a_problem(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.cloud.profile = replace(world.cloud.profile, leaves=("ssh_key",))
    killed_after_the_line(world, monkeypatch)
    world.cloud.broken["leftovers"] = Unknown("no network yet")
    assert world.drive() is ExitCode.DONE
    assert row(world).problems == ()
    assert len(row(world).warnings) == 1
    assert "no network yet" in row(world).warnings[0]


def test_a_machine_seen_then_is_ended_and_voids_the_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    late_by_seven_minutes(world)
    killed_after_the_line(world, monkeypatch)
    world.clock.sleep(300)
    assert world.drive() is ExitCode.DONE
    assert world.cloud.alive == []
    assert receipt_of(world)["cost"]["cap_kept"], "it was signed before, and cannot be changed"
    assert ["bound" in problem for problem in row(world).problems] == [True]
    assert not row(world).may_be_billing


def test_killed_again_in_that_end_the_run_is_red_until_gone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    late_by_seven_minutes(world)
    killed_after_the_line(world, monkeypatch)
    world.clock.sleep(300)
    world.cloud.killing = "before destroy"
    assert world.drive() == "killed"
    assert world.state.phase is Phase.SETTLED
    assert world.state.may_be_billing
    assert row(world).may_be_billing
    world.drive()
    assert world.cloud.alive == []
    assert world.state.phase is Phase.CLOSED
    assert not row(world).may_be_billing


def test_so_it_is_with_something_that_it_left_and_is_billed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    beside(world, billed=True)
    killed_after_the_line(world, monkeypatch)
    for thing in world.cloud.things:
        thing.removed_s = None  # Until now the lists have hidden the leftover.
    with monkeypatch.context() as patch:
        patch.setattr(world.cloud, "remove", lambda leftover: None)
        assert world.drive() == "destroy.leftover"
    assert row(world).may_be_billing
    assert world.drive() is ExitCode.DONE
    assert ["bound" in problem for problem in row(world).problems] == [True]
    assert not row(world).may_be_billing


def test_a_receipt_that_is_lost_then_is_made_again_byte_for_byte(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.cloud.profile = replace(world.cloud.profile, leaves=("ssh_key",))
    killed_after_the_line(world, monkeypatch)
    before = world.folder.receipt.read_bytes()
    world.folder.receipt.unlink()
    world.cloud.broken["leftovers"] = Unknown("no network yet")
    assert world.drive() is ExitCode.DONE
    assert world.folder.receipt.read_bytes() == before
