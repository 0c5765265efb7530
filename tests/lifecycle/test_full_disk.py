"""Tests of a full disk on this laptop: gpurun waits for room if files can still be saved, and ends every machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli import run_control
from gpurun.core.errors import ExitCode, GpurunError, MayBeBilling, SetupError
from gpurun.core.journal_records import Event, Phase
from gpurun.core.money import cost_of
from gpurun.core.paths import Home
from gpurun.core.run_plan import Lease
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger.journal import Journal
from gpurun.ledger.runs import look_at_run
from gpurun.lifecycle import supervisor
from gpurun.lifecycle.supervisor import keep_on, supervise
from gpurun.remote.interface import FarRefusal
from tests.changed_plan import changed_plan
from tests.lifecycle.drive import TINY
from tests.lifecycle.faults import ended, receipt_of
from tests.lifecycle.money_review import Session
from tests.lifecycle.never_gives_up import killed_and_overdue, late_machine, swept
from tests.lifecycle.scripted_cloud import LEASE, RATE, Killed, World
from tests.refusals import refusal

DAY_S = 24 * 3600.0
MINUTES_S = 600.0
# A lease that is long enough to show whether gpurun waits until it is over.
LONG = Lease(boot_s=120, ship_s=60, train_s=3600, collect_s=60, destroy_s=60, kill_allowance_s=60)


class Disk:
    """A simulated disk below a folder. While it is full, no byte can be written and no file created."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        write, make = os.write, os.open

        def written(descriptor: int, content: Any) -> int:
            if self.is_full and os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(root)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, content)

        def made(path: Any, flags: int, *more: Any, **named: Any) -> int:
            is_new = flags & os.O_CREAT and not os.path.exists(path)
            if self.is_full and is_new and str(path).startswith(str(root)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return make(path, flags, *more, **named)

        monkeypatch.setattr(os, "write", written)
        monkeypatch.setattr(os, "open", made)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(Home(tmp_path))
    monkeypatch.setattr(supervisor, "open_provider", lambda *_, **__: made.cloud)
    return made


@pytest.fixture
def disk(world: World, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(world.home.root, monkeypatch)


def leased_for_an_hour(world: World) -> None:
    worst = cost_of(RATE, LONG.total_s + LONG.kill_allowance_s, 1)
    world.plan = changed_plan(world.plan, {"lease": LONG, "cap_micros": worst, "worst_micros": worst})
    world.folder.plan.write_text(world.plan.to_json())


def once(world: World) -> ExitCode:
    """Run the real supervisor once."""
    return supervise(world.home, world.folder.name, world.clock, reach=world.reach, trainer=TINY / "trainer")


def killed_in_training(world: World) -> None:
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    world.folder.lock.touch()


def kept_on(world: World) -> ExitCode:
    return keep_on(lambda: once(world), lambda: world.state.may_be_billing, world.clock)


def at(world: World, when_s: float, do: Callable[[], object]) -> None:
    """Make the virtual clock call `do` once, when it first shows `when_s` or more."""
    sleep, done = world.clock.sleep, list[float]()

    def slept(seconds: float) -> None:
        sleep(seconds)
        if not done and world.clock.monotonic() >= when_s:
            done.append(when_s)
            do()

    world.clock.sleep = slept  # type: ignore[method-assign]


def give_room(world: World, disk: Disk, when_s: float) -> None:
    at(world, when_s, lambda: setattr(disk, "is_full", False))


def died_s(world: World) -> float:
    (box,) = world.cloud.boxes
    return float("inf") if box.died_s is None else box.died_s


# A supervisor that starts again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_lock", [True, False])
def test_past_the_lease_a_starting_supervisor_ends_then_records(world: World, disk: Disk, has_lock: bool) -> None:
    killed_and_overdue(world)
    if has_lock:
        world.folder.lock.touch()
    disk.is_full, began_s = True, world.clock.monotonic()
    give_room(world, disk, began_s + DAY_S)
    assert kept_on(world) is ExitCode.BUDGET_STOP
    assert died_s(world) < began_s + 60
    assert world.clock.monotonic() > began_s + DAY_S
    assert [data["reason"] for data in world.all_of(Event.DESTROY_INTENDED)] == ["destroy"]
    assert world.state.phase is Phase.CLOSED
    assert receipt_of(world)["cost"]["upper_bound_micros"] >= world.cloud.metered()


def test_an_outage_at_the_lease_end_delays_only_by_its_length(world: World, disk: Disk) -> None:
    world.far.train_s, world.far.during = 1e9, lambda: setattr(disk, "is_full", True)
    start_s = LEASE.total_s - LEASE.destroy_s - 30
    world.cloud.outages = [(start_s, start_s + MINUTES_S)]
    give_room(world, disk, DAY_S)
    assert kept_on(world) is ExitCode.BUDGET_STOP
    assert died_s(world) < start_s + 2 * MINUTES_S
    assert world.state.phase is Phase.CLOSED


def test_within_the_lease_a_starting_supervisor_waits_for_room(world: World, disk: Disk) -> None:
    killed_in_training(world)
    disk.is_full = True
    give_room(world, disk, world.clock.monotonic() + 120)
    assert once(world) is ExitCode.DONE
    assert len(world.at_home) == 3
    assert ended(world)


def test_a_starting_supervisor_does_a_standing_destroy_at_once(world: World, disk: Disk) -> None:
    leased_for_an_hour(world)
    killed_in_training(world)
    ask_to_stop(world.folder, "destroy", by="user", reason="test")
    disk.is_full, began_s = True, world.clock.monotonic()
    with refusal(MayBeBilling, "disk.full", "fox-41", "is gone"):
        once(world)
    assert died_s(world) < began_s + 60
    disk.is_full = False
    assert once(world) is ExitCode.INTERRUPTED
    assert ended(world)


def test_a_machine_that_may_exist_is_looked_for_and_ended(world: World, disk: Disk) -> None:
    """The create's answer was lost, and the user requests the end.

    A machine that is listed 100 s later must be ended although the disk is full.
    """
    world.cloud.killing, world.cloud.list_lag_s = "after create", 100.0
    assert world.drive() == "killed"
    ask_to_stop(world.folder, "destroy", by="user", reason="test")
    world.folder.lock.touch()
    disk.is_full = True
    with pytest.raises(MayBeBilling):
        once(world)
    assert died_s(world) < 200


def test_a_destroy_is_heard_while_a_supervisor_waits_for_room(world: World, disk: Disk) -> None:
    leased_for_an_hour(world)
    killed_in_training(world)
    disk.is_full, began_s = True, world.clock.monotonic()
    at(world, began_s + 60, lambda: world.folder.control.write_text('{"how": "destroy", "by": "user", "reason": ""}'))
    with pytest.raises(MayBeBilling):
        once(world)
    assert died_s(world) < began_s + 120


def test_with_nothing_requested_a_full_disk_is_only_reported(world: World, disk: Disk) -> None:
    disk.is_full = True
    with pytest.raises(SetupError) as refused:
        once(world)
    assert refused.value.exit_code is ExitCode.SETUP
    assert world.cloud.history == []


# A disk that fills up while the machine runs -------------------------------------------------------------------------


def full_from(event: Event, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the disk full just before the first record of this event is written."""
    append, seen = Journal.write, set[Event]()

    def appended(self: Journal, written: Event, data: Any) -> Any:
        disk.is_full = disk.is_full or (written is event and event not in seen)
        seen.add(written)
        return append(self, written, data)

    monkeypatch.setattr(Journal, "write", appended)


@pytest.mark.parametrize(
    "event",
    [Event.COLLECT_OBSERVED, Event.DESTROY_INTENDED, Event.DESTROY_ASKED, Event.DEATH_READ, Event.DEATH_PROVEN],
)
@pytest.mark.parametrize("room_s", [900.0, 4500.0])
def test_with_all_at_home_it_ends_and_only_the_proof_waits(
    world: World, disk: Disk, event: Event, room_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased_for_an_hour(world)
    full_from(event, disk, monkeypatch)
    give_room(world, disk, room_s)
    code = kept_on(world)
    trained_s = world.far.started_s + world.far.train_s
    assert died_s(world) < trained_s + 60
    assert world.clock.monotonic() >= room_s
    assert len(world.at_home) == 3
    assert world.state.phase is Phase.CLOSED
    assert receipt_of(world)["cost"]["upper_bound_micros"] >= world.cloud.metered()
    assert code is ExitCode.DONE
    assert len(world.all_of(Event.COLLECT_OBSERVED)[0]["files"]) == 3, "what came home is on record in the end"


@pytest.mark.parametrize("event", [Event.DESTROY_ASKED, Event.DEATH_READ, Event.DEATH_PROVEN])
def test_who_waits_for_the_proof_soon_hears_it_is_not_recorded(
    world: World, disk: Disk, event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_from(event, disk, monkeypatch)
    give_room(world, disk, 2 * LEASE.total_s)
    assert world.drive() == "disk.full"
    assert world.clock.monotonic() < LEASE.total_s
    assert world.state.may_be_billing


def test_what_the_user_wants_destroyed_waits_for_no_record(
    world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased_for_an_hour(world)
    full_from(Event.STOP_REQUESTED, disk, monkeypatch)
    world.far.train_s = 1e9
    world.far.during = lambda: (
        ask_to_stop(world.folder, "destroy", by="user", reason="test") if world.far.polls == 5 else None
    )
    assert world.drive() == "disk.full"
    assert died_s(world) < 120
    disk.is_full = False
    assert world.drive() is ExitCode.INTERRUPTED
    assert ended(world)


def test_an_unusable_machine_waits_for_no_record_either(
    world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased_for_an_hour(world)
    world.far.broken["unpack"] = FarRefusal("disk_full", "no room there")
    full_from(Event.STEP_FAILED, disk, monkeypatch)
    give_room(world, disk, 1800.0)
    world.drive()
    assert died_s(world) < 300
    assert world.state.failure.code == "far.disk_full", "why it failed is on record in the end"
    assert ended(world)


def test_a_late_machine_is_ended_though_it_cannot_be_recorded(
    world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late machine appears when the disk is full and the provider silent: it must end while the disk is full."""
    late_machine(world)
    full_from(Event.INCIDENT, disk, monkeypatch)

    def shown() -> None:
        if disk.is_full and not world.cloud.outages:
            world.cloud.outages = [(world.clock.monotonic(), world.clock.monotonic() + MINUTES_S)]

    passing = world.cloud.passing
    world.cloud.passing = lambda place: (shown(), passing(place))[1]
    give_room(world, disk, 2400.0)
    assert kept_on(world) is ExitCode.DONE
    assert world.cloud.outages
    assert world.clock.monotonic() > 2400.0
    assert max(box.died_s or DAY_S for box in world.cloud.boxes) < 2400.0
    assert world.state.phase is Phase.CLOSED
    assert receipt_of(world)["cost"]["upper_bound_micros"] >= world.cloud.metered()


def test_a_recorded_late_machine_is_ended_by_a_new_supervisor(
    world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_machine(world)
    destroy = world.cloud.destroy

    def killed_at_the_late_one(instance_id: str) -> None:
        if any(incident["code"] == "create.late" for incident in world.all_of(Event.INCIDENT)):
            raise Killed
        destroy(instance_id)

    with monkeypatch.context() as patch:
        patch.setattr(world.cloud, "destroy", killed_at_the_late_one)
        assert world.drive() == "killed"
    assert world.state.late
    disk.is_full = True
    with pytest.raises(MayBeBilling):
        once(world)
    assert world.cloud.alive == []


def test_what_is_still_to_come_home_is_waited_for(world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    leased_for_an_hour(world)
    full_from(Event.TRAIN_OBSERVED, disk, monkeypatch)
    give_room(world, disk, 1800.0)
    assert world.drive() is ExitCode.DONE
    assert died_s(world) > 1800.0
    assert len(world.at_home) == 3
    assert ended(world)


def test_a_destroy_ends_the_wait_for_files_still_to_come(
    world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased_for_an_hour(world)
    full_from(Event.TRAIN_OBSERVED, disk, monkeypatch)
    at(world, 900.0, lambda: world.folder.control.write_text('{"how": "destroy", "by": "user", "reason": ""}'))
    world.drive()
    assert 900.0 < died_s(world) < 1000.0


# The verbs -----------------------------------------------------------------------------------------------------------


def test_reap_ends_what_is_overdue_though_nothing_can_be_written(world: World, disk: Disk) -> None:
    killed_and_overdue(world)
    disk.is_full = True
    assert [machine.fate for machine in swept(world, world.home)] == ["destroyed"]
    assert world.cloud.alive == []
    disk.is_full = False
    assert once(world) is ExitCode.BUDGET_STOP
    assert world.state.phase is Phase.CLOSED


def test_reap_goes_on_past_a_run_that_it_fails_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_and_overdue(world)

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("gpurun.lifecycle.reaper.supervise", broken)
    assert [machine.fate for machine in swept(world, world.home)] == ["destroyed"]
    assert world.cloud.alive == []


def test_reap_ends_what_is_overdue_despite_another_users_files(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_and_overdue(world)

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for module in ("lifecycle.machine_owner", "ledger.runs"):
        monkeypatch.setattr(f"gpurun.{module}.holder_of", refused)
    assert [machine.fate for machine in swept(world, world.home)] == ["destroyed"]
    assert world.cloud.alive == []


def test_a_wish_that_cannot_be_written_says_what_to_do(world: World, disk: Disk) -> None:
    disk.is_full = True
    with refusal(SetupError, "control.unwritable", "No space left on device", "gpurun destroy fox-41"):
        ask_to_stop(world.folder, "save", by="user", reason="test")


def verb(world: World, how: Any) -> Any:
    """Do what `gpurun stop` or `gpurun destroy` does after the user's consent."""
    session: Any = Session(home=world.home, clock=world.clock)
    return run_control.stop_run(session, look_at_run(world.home, world.folder.name), how, "test")


def test_destroy_ends_the_machine_though_no_request_is_written(world: World, disk: Disk) -> None:
    leased_for_an_hour(world)
    killed_in_training(world)
    disk.is_full = True
    outcome = verb(world, "destroy")
    assert world.cloud.alive == []
    assert world.state.token in outcome.text
    assert (outcome.exit_code, outcome.errors[0].code) == (ExitCode.SETUP, "control.unwritable")


@pytest.mark.parametrize("verb_of_cloud", ["find", "destroy"])
def test_destroy_says_may_be_billing_when_nothing_came_through(world: World, disk: Disk, verb_of_cloud: str) -> None:
    killed_in_training(world)
    disk.is_full = True
    world.cloud.broken[verb_of_cloud] = SetupError("key.revoked", "The key is not accepted.", hint="Make a new one.")
    with pytest.raises(MayBeBilling):
        verb(world, "destroy")


def test_destroy_without_a_key_and_without_room_may_be_billing(
    world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_in_training(world)
    disk.is_full = True

    def no_key(*_: object, **__: object) -> None:
        raise SetupError("auth.no_key", "There is no key.", hint="Give one.")

    monkeypatch.setattr(supervisor, "open_provider", no_key)
    with refusal(MayBeBilling, "destroy.cannot_look", "no key"):
        verb(world, "destroy")


def test_stop_says_that_nobody_was_asked(world: World, disk: Disk) -> None:
    killed_in_training(world)
    disk.is_full = True
    with pytest.raises(GpurunError) as refused:
        verb(world, "save")
    assert refused.value.exit_code is ExitCode.SETUP
    assert len(world.cloud.alive) == 1


def test_a_log_that_cannot_be_opened_stops_no_supervisor(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def begin(command: list[str], **named: Any) -> Any:
        begun.append(command)
        return type("Child", (), {"poll": lambda _: 0})()

    world.folder.supervisor_log.mkdir()
    monkeypatch.setattr("subprocess.Popen", begin)
    supervisor.start_supervisor(world.folder, world.home, world.clock)
    assert len(begun) == 1
