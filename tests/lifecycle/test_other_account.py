"""Tests of a run under another account's key: that account cannot see the machine, which does not prove its death."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.cli import run_control
from gpurun.cli.commands.reap import reap
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event, Phase
from gpurun.core.paths import Home
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger.runs import look_at_run
from gpurun.providers import registry
from gpurun.providers.base import Unknown
from tests.lifecycle.faults import receipt_of
from tests.lifecycle.scripted_cloud import ScriptedCloud, World


class Account(ScriptedCloud):
    """The cloud as seen with the key of one account, which `mark` identifies."""

    mark = "key:1111"

    def account_mark(self) -> str:
        return self.mark


def silent() -> str:
    raise Unknown("503")


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(Home(tmp_path))
    world.cloud = Account(world.clock)
    world.far.cloud = world.cloud
    return world


def killed_while_it_trained(world: World) -> ScriptedCloud:
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    assert len(world.cloud.alive) == 1
    return world.cloud


def other(world: World, mark: str) -> ScriptedCloud:
    """Return the cloud as another account sees it, without any machine."""
    cloud = Account(world.clock)
    cloud.mark = mark
    return cloud


def new_key(cloud: ScriptedCloud, mark: str) -> None:
    """Give the same account a new key, which sees every machine."""
    assert isinstance(cloud, Account)
    cloud.mark = mark


def test_the_intent_names_the_account_before_anything_is_asked(world: World) -> None:
    assert world.drive() is ExitCode.DONE
    assert world.all_of(Event.CREATE_INTENDED)[0]["account"] == "key:1111"


def test_nothing_is_asked_for_while_the_account_is_unknown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.cloud, "account_mark", silent)
    assert world.drive() is ExitCode.NO_OFFER
    assert world.all_of(Event.CREATE_INTENDED) == []


@pytest.mark.parametrize("how", ["destroy", "save", ""])
def test_absence_under_another_accounts_key_is_no_death(world: World, how: str) -> None:
    right = killed_while_it_trained(world)
    if how:
        ask_to_stop(world.folder, how, by="user", reason="")  # type: ignore[arg-type]
    world.clock.sleep(world.plan.lease.total_s + 60)
    world.cloud = other(world, "key:2222")
    assert world.drive() == "account.other"
    assert world.state.may_be_billing
    assert world.all_of(Event.DEATH_PROVEN) == []
    assert len(right.alive) == 1

    world.cloud = right
    assert world.state.phase is Phase.DESTROYING
    world.drive()
    assert right.alive == []
    assert world.state.phase is Phase.CLOSED


def test_absence_under_another_accounts_key_is_no_refusal_either(world: World) -> None:
    """The supervisor died right after the create. The empty list of another account must not make gpurun rent again."""
    world.cloud.killing = "after create"
    assert world.drive() == "killed"
    right, world.cloud = world.cloud, other(world, "key:2222")
    assert world.drive() == "account.other"
    assert world.cloud.created == 0
    world.cloud = right
    assert world.drive() is ExitCode.DONE
    assert (right.created, right.alive) == (1, [])


def test_a_new_key_that_sees_the_machine_needs_no_confirmation(world: World) -> None:
    cloud = killed_while_it_trained(world)
    new_key(cloud, "key:3333")
    assert world.drive() is ExitCode.DONE
    assert cloud.alive == []
    assert world.all_of(Event.INCIDENT) == []


def test_a_new_key_that_sees_nothing_needs_the_users_word(world: World) -> None:
    cloud = killed_while_it_trained(world)
    for box in cloud.alive:
        box.died_s = world.clock.monotonic()
    world.clock.sleep(world.plan.lease.total_s + 60)
    new_key(cloud, "key:3333")
    assert world.drive() == "account.other"
    ask_to_stop(world.folder, "destroy", by="user", reason="")
    assert world.drive() == "account.other"
    ask_to_stop(world.folder, "destroy", by="user", reason="", same_account=True)
    world.drive()
    assert world.state.phase is Phase.CLOSED
    assert [incident["code"] for incident in receipt_of(world)["incidents"]].count("account.vouched") == 1


def test_nobody_can_vouch_for_an_account_that_its_provider_names(world: World) -> None:
    assert isinstance(world.cloud, Account)
    world.cloud.mark = "account:aaaa"
    killed_while_it_trained(world)
    world.clock.sleep(world.plan.lease.total_s + 60)
    world.cloud = other(world, "account:bbbb")
    ask_to_stop(world.folder, "destroy", by="user", reason="", same_account=True)
    assert world.drive() == "account.other"
    assert world.state.may_be_billing


def test_an_unknown_account_does_not_delay_a_machines_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requested end must not wait until the account is known.

    The token shows that the machine belongs to this run.
    """
    cloud = killed_while_it_trained(world)
    ask_to_stop(world.folder, "destroy", by="user", reason="")
    monkeypatch.setattr(cloud, "account_mark", silent)
    began_s = world.clock.monotonic()
    world.drive()
    assert cloud.boxes[0].died_s is not None
    assert cloud.boxes[0].died_s - began_s < 10
    assert world.state.phase is Phase.CLOSED


def test_an_empty_view_proves_no_death_for_an_unknown_account(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = killed_while_it_trained(world)
    world.cloud = other(world, "key:1111")
    ask_to_stop(world.folder, "destroy", by="user", reason="")
    with monkeypatch.context() as patch:
        patch.setattr(world.cloud, "account_mark", silent)
        assert world.drive() == "destroy.not_gone"
        assert world.all_of(Event.DEATH_READ) == []
    world.cloud = cloud
    world.drive()
    assert cloud.alive == []


def test_a_cut_create_is_adopted_for_an_unknown_account(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.cloud.killing = "after create"
    assert world.drive() == "killed"
    monkeypatch.setattr(world.cloud, "account_mark", silent)
    assert world.drive() is ExitCode.DONE
    assert (world.cloud.created, world.cloud.alive) == (1, [])


def reaped(world: World, patch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Return the exit code of `gpurun reap --exit-code`, and the codes of its errors."""
    patch.setattr("gpurun.providers.registry.ready_providers", lambda home: [])
    patch.setattr("gpurun.providers.registry.open_provider", lambda *_, **__: world.cloud)
    outcome = reap(Session(home=world.home, clock=world.clock), ["local"], exit_code=True)
    return int(outcome.exit_code), "".join(error.code for error in outcome.errors)


@pytest.mark.parametrize("mark", ["key:2222", "account:2222"])
def test_another_accounts_sweep_gives_this_home_no_all_clear(
    world: World, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    right = killed_while_it_trained(world)
    world.cloud = other(world, mark)
    assert reaped(world, monkeypatch) == (9, "account.other")
    monkeypatch.setattr(world.cloud, "account_mark", silent)
    assert reaped(world, monkeypatch) == (9, "reap.cannot_look")
    world.cloud = right
    assert reaped(world, monkeypatch) == (0, "")
    new_key(right, "key:3333")
    assert reaped(world, monkeypatch) == (0, ""), "it is shown all, so it is the same account's"


def test_a_damaged_run_unseen_by_another_account_was_not_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    right = killed_while_it_trained(world)
    lines = world.folder.journal.read_bytes().splitlines(keepends=True)
    world.folder.journal.write_bytes(b"".join([*lines[:-2], b"damage\n", lines[-1]]))
    sight, session = look_at_run(world.home, "fox-41"), Session(home=world.home, clock=world.clock)
    assert sight.damage
    monkeypatch.setattr(registry, "open_provider", lambda *_, **__: world.cloud)
    world.cloud = other(world, "key:2222")
    outcome = run_control.sweep_damaged(session, sight)
    assert (outcome.exit_code, [error.code for error in outcome.errors]) == (ExitCode.MAY_BE_BILLING, ["account.other"])
    assert len(right.alive) == 1
    world.cloud = right
    assert run_control.sweep_damaged(session, sight).exit_code is ExitCode.DONE
    assert right.alive == []


def test_a_user_who_vouches_for_a_damaged_runs_key_is_believed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    right = killed_while_it_trained(world)
    for box in right.boxes:
        box.died_s = right.now
    world.folder.journal.write_bytes(world.folder.journal.read_bytes() + b"damage\n{}\n")
    new_key(right, "key:2222")
    monkeypatch.setattr(registry, "open_provider", lambda *_, **__: world.cloud)
    sight, session = look_at_run(world.home, "fox-41"), Session(home=world.home, clock=world.clock)
    assert run_control.sweep_damaged(session, sight).exit_code is ExitCode.MAY_BE_BILLING
    assert run_control.sweep_damaged(session, sight, same_account=True).exit_code is ExitCode.DONE
