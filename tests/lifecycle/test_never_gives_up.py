"""Tests that gpurun keeps asking while something may be billed, and ends every machine that appears."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gpurun.cli.viewer import result_without_supervisor
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode, MayBeBilling, RunHeld, SetupError
from gpurun.core.journal_records import Event, Phase
from gpurun.core.paths import Home, RunFolder, read_regular
from gpurun.core.records import Instance, Order
from gpurun.core.stop_request import StopRequest, read_stop_request
from gpurun.ledger.audit import audit
from gpurun.ledger.runs import look_at_run
from gpurun.lifecycle import driver, supervisor
from gpurun.lifecycle.instance.terminate import prove_termination
from gpurun.lifecycle.reaper import sweep, sweep_run
from gpurun.lifecycle.steps import close_run
from gpurun.lifecycle.supervisor import keep_on
from gpurun.providers.base import Unknown
from gpurun.remote.machine_facts import MachineFacts
from tests.emulators.fake import Fault
from tests.lifecycle.faults import ended, kept, receipt_of
from tests.lifecycle.never_gives_up import killed_and_overdue, late_machine, supervised, swept
from tests.lifecycle.scripted_cloud import LEASE, World
from tests.refusals import lacking


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def test_a_provider_deaf_for_half_an_hour_is_still_asked(world: World) -> None:
    world.cloud.deaf_destroys = 60
    began_s = world.clock.monotonic()
    assert keep_on(supervised(world), lambda: world.state.may_be_billing, world.clock) is ExitCode.DONE
    assert world.clock.monotonic() - began_s > 1800
    assert world.cloud.alive == []
    assert world.state.phase is Phase.CLOSED


def test_what_cannot_be_billed_is_not_tried_for_ever(world: World) -> None:
    def refused() -> ExitCode:
        raise SetupError("auth.no_key", "There is no key.", hint="Give one.")

    with pytest.raises(SetupError):
        keep_on(refused, lambda: False, world.clock)


def test_why_a_run_is_undriven_is_not_read_from_an_earlier_note(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hello, why = world.far.hello, SetupError("ledger.unwritable", "ledger.jsonl cannot be written.", hint="Mend it.")

    def nightly(python: str | None = None, **_: Any) -> MachineFacts:
        facts = hello(python)
        return facts.model_copy(update={"torch": facts.torch.model_copy(update={"version": "nightly"})})

    def refuse(*_: object) -> NoReturn:
        raise why

    world.far.hello = nightly  # type: ignore[method-assign]
    monkeypatch.setattr(close_run, "write_receipt", refuse)
    assert world.drive() == "ledger.unwritable"
    assert [incident["code"] for incident in world.all_of(Event.INCIDENT)] == ["box.warning"]
    world.folder.supervisor_log.write_text(f"ERROR {why.code}: {why.what} {why.hint}\n")
    (error,) = result_without_supervisor(look_at_run(world.home, world.folder.name)).errors
    assert why.what in error.what


def test_a_run_that_another_took_over_is_left_to_it(world: World) -> None:
    def held() -> ExitCode:
        raise RunHeld("run.held", "Another process drives it.", hint="gpurun attach")

    with pytest.raises(RunHeld):
        keep_on(held, lambda: True, world.clock)


def test_an_error_of_any_kind_is_no_reason_to_leave_a_machine(world: World) -> None:
    broken = [OSError(errno.EIO, "Input/output error"), KeyError("state"), SetupError("a.b", "No.", hint="Wait.")]

    def once() -> ExitCode:
        if broken:
            raise broken.pop()
        return supervised(world)()

    assert keep_on(once, lambda: True, world.clock) is ExitCode.DONE
    with pytest.raises(OSError, match="Input/output"):
        keep_on(raising(OSError(errno.EIO, "Input/output error")), lambda: False, world.clock)


def raising(error: Exception) -> Callable[..., ExitCode]:
    def once(*_: object, **__: object) -> ExitCode:
        raise error

    return once


def test_what_cannot_be_looked_at_may_be_billed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not supervisor._is_billing(world.home, "fox-41")
    monkeypatch.setattr(
        supervisor, "look_at_run", raising(SetupError("journal.unreadable", "It cannot be read.", hint="Wait."))
    )
    assert supervisor._is_billing(world.home, "fox-41")


def unreadable(world: World, monkeypatch: pytest.MonkeyPatch, *, number: int) -> None:
    """Make reading control.json fail with this errno once training has begun."""

    def refused(path: Path) -> bytes:
        if world.far.polls > 3:
            raise OSError(number, os.strerror(number), str(path))
        return read_regular(path)

    monkeypatch.setattr("gpurun.core.stop_request.read_regular", refused)


def test_a_request_only_another_user_can_read_stops_it_gently(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sudo gpurun stop` leaves a file that only root can read. gpurun must take it for a request to stop and save."""
    world.far.train_s = 1e9
    world.far.during = lambda: world.folder.control.touch() if world.far.polls == 4 else None
    unreadable(world, monkeypatch, number=errno.EACCES)
    assert world.drive() is ExitCode.DONE
    (stop,) = world.all_of(Event.STOP_REQUESTED)
    assert lacking(stop["reason"], "control.json", "Permission denied") == []
    assert len(world.at_home) == 3
    assert kept(world)


def test_a_wish_that_is_not_there_is_none_though_reading_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If gpurun has no free file handle for a moment, it must not take that for a user's request to stop."""
    unreadable(world, monkeypatch, number=errno.EMFILE)
    assert world.drive() is ExitCode.DONE
    assert not world.all_of(Event.STOP_REQUESTED)
    assert kept(world)


def failing_between_steps(world: World, monkeypatch: pytest.MonkeyPatch, until_s: float) -> None:
    def failing(folder: RunFolder) -> StopRequest | None:
        if world.all_of(Event.SHIP_OBSERVED) and world.clock.monotonic() < until_s:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_stop_request(folder)

    monkeypatch.setattr(driver, "read_stop_request", failing)


def test_a_failure_between_two_steps_is_shown_once_and_outwaited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_between_steps(world, monkeypatch, until_s=150.0)
    assert world.drive() is ExitCode.DONE
    (incident,) = world.all_of(Event.INCIDENT)
    assert (incident["code"], "OSError" in incident["message"]) == ("bug", True)
    assert len(world.at_home) == 3
    assert kept(world)


def test_a_lasting_failure_between_steps_ends_with_the_lease(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_between_steps(world, monkeypatch, until_s=2 * LEASE.total_s)
    assert world.drive() == "bug"
    (box,) = world.cloud.boxes
    assert LEASE.total_s - LEASE.destroy_s <= (box.died_s or 0) <= LEASE.total_s + LEASE.kill_allowance_s
    assert keep_on(supervised(world), lambda: world.state.may_be_billing, world.clock) is ExitCode.BUDGET_STOP
    assert ended(world)


def test_a_trace_that_cannot_be_written_ends_no_supervisor(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        if world.far.polls == 4:
            raise RuntimeError("a bug")

    world.far.during = broken
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        code = world.drive()
        monkeypatch.undo()
    assert code is ExitCode.BUG
    assert lacking(world.state.failure.message, "watch", "RuntimeError", "a bug") == []
    assert kept(world)


def test_what_part_of_a_provider_shows_is_ended_despite_silence(world: World, tmp_path: Path) -> None:
    """One region does not answer: an overdue machine in another region must be ended nevertheless."""
    killed_and_overdue(world)
    find = world.cloud.find

    def in_part(token: str | None) -> list[Instance]:
        if token is None:
            raise Unknown("eu-west-9 does not answer", found=tuple(find(None)))
        return find(token)

    world.cloud.find = in_part  # type: ignore[method-assign]
    with pytest.raises(MayBeBilling, match="eu-west-9"):
        swept(world, Home(tmp_path / "elsewhere"))
    assert world.cloud.alive == []


def test_a_machine_of_unknown_id_is_ended_from_a_partial_list(world: World) -> None:
    """The create's answer is lost, and every list breaks off after its first page.

    A machine on that page must be ended.
    """
    find = world.cloud.find

    def first_page(token: str | None) -> list[Instance]:
        raise Unknown("the next page cannot be had", found=tuple(find(token)))

    world.cloud.find = first_page  # type: ignore[method-assign]
    order = Order(run="fox-41", token="gr-fox-41-0", attempt=1, offer=world.plan.offer, deadline_wall=9e9)
    world.cloud.create(order)
    with pytest.raises(MayBeBilling):
        list(prove_termination(world.cloud, world.clock, "", order.token, run=order.run))
    assert world.cloud.alive == []


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_wrong_laptop_clock_ends_no_machine_early_or_late(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    elsewhere = Home(tmp_path / "elsewhere")
    wrong = _Wrong(world.clock, ahead_s)
    monkeypatch.setattr(type(world.cloud), "clock_ahead_s", ahead_s)

    def reap() -> list[str]:
        orphans = sweep([world.cloud], elsewhere, wrong, destroy_all=False, older_than_s=0, look_only=False)
        return [orphan.fate for orphan in orphans]

    assert reap() == ["within lease"]
    world.clock.sleep(world.plan.lease.total_s + 60)
    assert reap() == ["destroyed"]


class _Wrong(VirtualClock):
    """A laptop's clock that shows a time `ahead_s` seconds after the right clock's, and runs as fast."""

    def __init__(self, right: VirtualClock, ahead_s: float) -> None:
        super().__init__()
        self.right, self.ahead_s = right, ahead_s

    def wall(self) -> float:
        return self.right.wall() + self.ahead_s

    def monotonic(self) -> float:
        return self.right.monotonic()

    def sleep(self, seconds: float) -> None:
        self.right.sleep(seconds)


def test_one_possibly_old_list_does_not_sweep_a_damaged_journal(world: World) -> None:
    killed_and_overdue(world)
    find, lists = world.cloud.find, []

    def old_at_first(token: str | None) -> list[Instance]:
        lists.append(token)
        return [] if len(lists) == 1 else find(token)

    world.cloud.find = old_at_first  # type: ignore[method-assign]
    assert sweep_run(world.cloud, world.folder, world.clock)
    assert world.cloud.alive == []


def test_the_cost_includes_a_late_machine_from_request_to_end(world: World) -> None:
    late_machine(world)
    world.drive()
    cost = receipt_of(world)["cost"]
    assert cost["upper_bound_micros"] >= world.cloud.metered()
    assert "second machine" in cost["says"]
    assert audit(world.home).rows[0].problems == ()
    assert not audit(world.home).rows[0].may_be_billing


def test_what_came_late_and_will_not_go_is_red_until_it_is_gone(world: World) -> None:
    late_machine(world)
    deaf = world.cloud.script.setdefault("destroy", [])
    prove = world.cloud.destroy

    def deaf_to_the_late_one(instance_id: str) -> None:
        if any(incident.get("code") == "create.late" for incident in world.all_of(Event.INCIDENT)):
            deaf[:] = [Fault.DEAF] * 40
        prove(instance_id)

    world.cloud.destroy = deaf_to_the_late_one  # type: ignore[method-assign]
    assert world.drive() == "destroy.not_gone"
    assert world.state.may_be_billing
    assert audit(world.home).rows[0].may_be_billing
    world.cloud.destroy = prove  # type: ignore[method-assign]
    deaf.clear()
    world.drive()
    assert world.state.phase is Phase.CLOSED
    assert world.cloud.alive == []


@pytest.mark.parametrize(("ahead_s", "words"), [(90.0, "90 s ahead of"), (-3600.0, "3600 s behind"), (20.0, "")])
def test_a_clock_that_is_wrong_stands_in_the_receipt(
    world: World, monkeypatch: pytest.MonkeyPatch, ahead_s: float, words: str
) -> None:
    monkeypatch.setattr(type(world.cloud), "clock_ahead_s", ahead_s)
    assert world.drive() is ExitCode.DONE
    incidents = [incident for incident in receipt_of(world)["incidents"] if incident["code"] == "clock.wrong"]
    assert [words in incident["message"] for incident in incidents] == ([True] if words else [])
