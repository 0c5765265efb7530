"""Tests of a billed volume that cannot be removed: every command exits with 9, and gpurun keeps trying to remove it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from gpurun.cli.commands.ps import ps
from gpurun.cli.session import Session
from gpurun.cli.unfinished import note_unfinished
from gpurun.cli.viewer import result_without_supervisor
from gpurun.core.errors import ExitCode, SetupError
from gpurun.core.journal_records import Event, Phase
from gpurun.core.paths import Home
from gpurun.core.records import Leftover, Order
from gpurun.ledger.audit import audit
from gpurun.ledger.runs import gave_up, look_at_run
from gpurun.lifecycle import supervisor
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.supervisor import keep_on
from gpurun.providers.base import Unknown
from tests.lifecycle.faults import receipt_of
from tests.lifecycle.matrix_destroy import beside
from tests.lifecycle.never_gives_up import supervised
from tests.lifecycle.scripted_cloud import ScriptedCloud, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(Home(tmp_path))
    beside(world, billed=True)
    return world


@pytest.fixture
def left(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a world whose supervisor gave up because the volume could not be removed.

    Now the volume can be removed.
    """
    with monkeypatch.context() as patch:
        patch.setattr(world.cloud, "remove", lambda leftover: None)
        assert world.drive() == "destroy.leftover"
    return world


def settled(world: World) -> bool:
    """Assert that the volume is gone, the run is closed and the audit finds no problem."""
    assert world.cloud.leftovers(None) == []
    assert world.state.phase is Phase.CLOSED
    row = audit(world.home).rows[0]
    assert (row.problems, row.may_be_billing) == ((), False)
    return True


def test_it_is_tried_again_until_it_is_gone(world: World) -> None:
    remove, began_s = world.cloud.remove, world.clock.monotonic()

    def after_half_an_hour(leftover: object) -> None:
        if world.clock.monotonic() - began_s > 1800:
            remove(leftover)  # type: ignore[arg-type]

    world.cloud.remove = after_half_an_hour  # type: ignore[method-assign]
    assert keep_on(supervised(world), lambda: world.state.may_be_billing, world.clock) is ExitCode.DONE
    assert world.clock.monotonic() - began_s > 1800
    assert settled(world)


def test_everybody_who_is_asked_says_9_meanwhile(
    left: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, started = Session(home=left.home, clock=left.clock), list[str]()
    assert result_without_supervisor(look_at_run(left.home, "fox-41")).exit_code is ExitCode.MAY_BE_BILLING
    listed = ps(session, all_runs=False)
    assert listed.exit_code is ExitCode.MAY_BE_BILLING
    assert "MAY BE BILLING" in listed.text
    row = audit(left.home).rows[0]
    assert (row.may_be_billing, row.death) == (True, "proven")
    monkeypatch.setattr(supervisor, "start_supervisor", lambda folder, *_: started.append(folder.name))
    note_unfinished(session)
    assert started == ["fox-41"]
    assert "billed" in capsys.readouterr().err


def test_ps_calls_no_left_volume_overdue(left: World) -> None:
    """The deadline of a machine does not apply to the volume that it left: `ps` must not call the volume overdue."""
    left.clock.sleep(left.plan.lease.total_s)
    assert "OVERDUE" not in ps(Session(home=left.home, clock=left.clock), all_runs=False).text


def test_a_billed_leftover_leaves_the_receipt_without_a_bound(left: World) -> None:
    assert left.drive() is ExitCode.DONE
    cost = receipt_of(left)["cost"]
    assert (cost["upper_bound_micros"], cost["cap_kept"], cost["is"]) == (None, None, "unknown")
    assert settled(left)


def test_a_provider_that_falls_silent_does_not_make_it_free(left: World) -> None:
    left.cloud.broken["leftovers"] = Unknown("503")
    assert left.drive() == "destroy.leftover"
    assert not left.folder.receipt.exists()
    del left.cloud.broken["leftovers"]
    assert left.drive() is ExitCode.DONE
    assert settled(left)


def test_one_empty_list_before_silence_does_not_end_a_leftover(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [world.cloud.leftovers, lambda _: []]

    def leftovers(token: str | None) -> list[Leftover]:
        if not answers:
            raise Unknown("503")
        return answers.pop(0)(token)

    with monkeypatch.context() as patch:
        patch.setattr(world.cloud, "remove", lambda leftover: None)
        patch.setattr(world.cloud, "leftovers", leftovers)
        assert world.drive() == "destroy.leftover"
    assert world.drive() is ExitCode.DONE
    assert settled(world)


@pytest.mark.parametrize("account", ["account:1111", "key:1111"])
def test_a_leftover_unseen_by_another_accounts_key_remains(
    world: World, monkeypatch: pytest.MonkeyPatch, account: str
) -> None:
    world.cloud.account = account
    with monkeypatch.context() as patch:
        patch.setattr(world.cloud, "remove", lambda leftover: None)
        assert world.drive() == "destroy.leftover"
    right, world.cloud = world.cloud, ScriptedCloud(world.clock)
    world.cloud.account = "key:2222"
    assert world.drive() == "account.other"
    assert world.state.may_be_billing
    world.cloud = right
    assert world.drive() is ExitCode.DONE
    assert settled(world)


def test_a_provider_whose_key_is_gone_leaves_it_red(left: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> NoReturn:
        raise SetupError("auth.no_key", "There is no key.", hint="Give one.")

    with monkeypatch.context() as patch:
        patch.setattr(Context, "provider_named", closed)
        assert left.drive() == "destroy.cannot_ask"
    assert left.drive() is ExitCode.DONE
    assert settled(left)


def test_it_is_reported_once_however_often_it_is_tried(left: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(left.cloud, "remove", lambda leftover: None)
        assert left.drive() == "destroy.leftover"
    assert left.drive() is ExitCode.DONE
    codes = [incident["code"] for incident in left.all_of(Event.INCIDENT)]
    assert (codes.count("leftover"), codes.count("leftover_gone")) == (1, 1)


def test_a_supervisor_whose_last_word_is_a_note_is_restarted(left: World) -> None:
    assert gave_up(look_at_run(left.home, "fox-41"))
    lines = left.folder.journal.read_bytes().splitlines(keepends=True)
    left.folder.journal.write_bytes(b"".join(lines[:-1]))
    assert not gave_up(look_at_run(left.home, "fox-41"))


def test_an_unremovable_free_leftover_keeps_no_billed_one(world: World) -> None:
    """If a firewall group that costs nothing cannot be removed yet, the billed disk after it must still be removed."""
    world.cloud.profile = replace(world.cloud.profile, leaves=("group", "disk"))
    leave, remove = world.cloud._leave_things, world.cloud.remove

    def left(order: Order) -> None:
        leave(order)
        group = world.cloud.things[0]
        group.leftover = group.leftover.model_copy(update={"billed": False})

    def held(leftover: Leftover) -> None:
        if leftover.kind == "group":
            raise Unknown("DependencyViolation")
        remove(leftover)

    world.cloud._leave_things, world.cloud.remove = left, held  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert [leftover.kind for leftover in world.cloud.leftovers(None)] == ["group"]
