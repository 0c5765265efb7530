"""Tests of the watch during a run: a second machine or a risen price is found, and shortens the training."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from shutil import copytree

import pytest

from gpurun.cli.run_control import confirm_resume_here
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode, UsageError
from gpurun.core.journal_records import Event
from gpurun.core.money import Micros, cost_of, times, total, usd
from gpurun.core.paths import Home
from gpurun.core.records import Instance, InstanceState, Order
from gpurun.ledger.runs import gave_up, look_at_run
from gpurun.lifecycle.artifacts.inventory import Inventory
from gpurun.providers.base import Throttled
from tests.emulators.fake import Fault
from tests.lifecycle.scripted_cloud import LEASE, RATE, ScriptedCloud, World
from tests.refusals import refusal


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return a world whose cap pays for just one machine, and whose trainer would never end."""
    world = World(Home(tmp_path))
    capped(world, 1)
    world.far.train_s = 1e6
    return world


def capped(world: World, machines: int) -> None:
    """Give the run a cap that pays for this many machines at their worst case."""
    world.plan = world.plan.model_copy(update={"cap_micros": times(world.plan.worst_micros, machines)})
    world.folder.plan.write_text(world.plan.to_json())


def incidents(world: World) -> list[str]:
    return [incident["code"] for incident in world.all_of(Event.INCIDENT)]


def kept(world: World) -> bool:
    """Assert that no machine lives and that the meter is within the cap."""
    assert world.cloud.alive == []
    assert world.cloud.metered() <= (world.plan.cap_micros or 0)
    return True


def test_a_second_machine_seen_late_ends_while_the_first_trains(world: World) -> None:
    """One create makes two machines, and lists lag by a minute: the second must end while the first trains."""
    world.cloud.creates = ["made twice"]
    world.cloud.list_lag_s = 60.0
    assert world.drive() is ExitCode.BUDGET_STOP
    first, second = world.cloud.boxes
    assert second.died_s is not None
    assert second.died_s < 100
    assert first.died_s is not None
    assert first.died_s < LEASE.total_s - 60, "what the second one cost is taken off its time"
    planned = world.all_of(Event.TRAIN_INTENDED)[0]["hard_stop_wall"]
    first_wall, last_wall = world.far.shortened[0][1], world.far.shortened[-1][1]
    assert last_wall < first_wall < planned - 60 - LEASE.destroy_s - LEASE.kill_allowance_s, "it is still to be ended"
    assert incidents(world)[:2] == ["create.duplicate", "create.duplicate_gone"]
    assert kept(world)


def test_a_machine_back_after_believed_absence_ends_in_minutes(world: World) -> None:
    """The create's answer is lost and lists lag, so gpurun rents again.

    Once the first machine is listed, it must end.
    """
    capped(world, 2)
    world.cloud.creates = ["made, answer lost"]
    world.cloud.list_lag_s = 150.0
    assert world.drive() is ExitCode.BUDGET_STOP
    assert world.cloud.created == 2
    first = world.cloud.boxes[0]
    assert first.died_s is not None
    assert first.died_s < 150 + 150
    assert kept(world)


def test_no_second_is_asked_for_where_the_cap_does_not_pay_both(world: World) -> None:
    world.cloud.creates = ["made, answer lost"]
    world.cloud.list_lag_s = 150.0
    assert world.drive() is ExitCode.BUDGET_STOP
    assert world.cloud.created == 1
    assert incidents(world)[0] == "create.unseen"
    assert world.all_of(Event.CREATE_OBSERVED)[0]["adopted"]
    assert kept(world)


def test_a_third_is_asked_for_only_if_the_cap_pays_for_all(world: World) -> None:
    capped(world, 2)
    world.cloud.creates = [str(Fault.DROPPED)] * 3
    assert world.drive() is ExitCode.NO_OFFER
    assert world.cloud.created == 2
    assert incidents(world) == ["create.unseen"]


def test_a_lost_create_is_sought_to_its_deadline_at_no_cost(world: World) -> None:
    world.cloud.creates = [str(Fault.DROPPED)]
    assert world.drive() is ExitCode.NO_OFFER
    assert world.cloud.created == 1
    assert LEASE.total_s - 2 * LEASE.destroy_s < world.clock.monotonic() < LEASE.total_s
    assert world.cloud.boxes == []
    assert kept(world)


def test_a_price_that_rose_is_reckoned_with_at_once(world: World) -> None:
    rose_s, began_wall = 100.0, world.clock.wall()
    world.cloud.reported_rate = lambda verb: usd(4) if world.clock.monotonic() >= rose_s else RATE
    assert world.drive() is ExitCode.BUDGET_STOP
    (box,) = world.cloud.boxes
    assert box.died_s is not None
    paid = total(cost_of(RATE, rose_s), cost_of(usd(4), box.died_s - rose_s))
    assert incidents(world) == ["price.rose"]
    assert world.far.shortened[-1][1] < began_wall + box.died_s, "the machine knows in time to save"
    assert paid <= (world.plan.cap_micros or Micros(0))
    assert paid > (world.plan.cap_micros or 0) * 0.45, "it is not ended before it has to be"


def test_a_machine_listed_but_not_read_ends_after_a_second_list(
    world: World,
) -> None:
    """A machine that only one list shows may come from an old answer.

    gpurun must end it only if the next list shows it too.
    """
    real, born = world.cloud.find, []

    def once_a_ghost(token: str | None) -> list[Instance]:
        found = real(token)
        if token is None and found and not born:
            born.append(found[0])
            return [*found, found[0].model_copy(update={"id": "i-ghost"})]
        return found

    world.cloud.find = once_a_ghost  # type: ignore[method-assign]
    world.drive()
    assert born
    assert "create.duplicate" not in incidents(world)


def test_what_carries_no_token_of_this_run_is_left_alone(world: World) -> None:
    order = Order(run="fox-4", token="gr-fox-4-00000000", attempt=1, offer=world.plan.offer, deadline_wall=9e9)
    stranger = world.cloud.create(order)
    world.drive()
    assert [box.id for box in world.cloud.alive] == [stranger.id]
    assert incidents(world) == []


def test_a_second_machine_that_stays_ends_the_run_within_the_cap(world: World) -> None:
    capped(world, 2)
    world.cloud.creates = ["made twice"]
    destroy = world.cloud.destroy
    world.cloud.destroy = lambda name: None if name == world.cloud.boxes[1].id else destroy(name)  # type: ignore[method-assign]
    world.cloud.list_lag_s = 60.0
    assert world.drive() == "destroy.not_gone"
    first, second = world.cloud.boxes
    assert first.died_s is not None
    assert second.died_s is None
    assert world.state.may_be_billing
    assert world.cloud.metered() < (world.plan.cap_micros or 0) * 1.5


class Busy(ScriptedCloud):
    """A cloud that records the time of each full list, and refuses full lists with 429 from `busy_from_s` on."""

    listed_s: list[float]
    busy_from_s = float("inf")

    def find(self, token: str | None) -> list[Instance]:
        if token is None:
            self.listed_s.append(self.now)
            if self.now >= self.busy_from_s:
                raise Throttled("429")
        return super().find(token)


def busy(world: World, from_s: float) -> Busy:
    cloud = Busy(world.clock)
    cloud.listed_s, cloud.busy_from_s = [], from_s
    world.cloud = cloud
    world.far.cloud = cloud
    return cloud


def gaps(cloud: Busy, since_s: float) -> list[float]:
    seen = [at_s for at_s in cloud.listed_s if at_s >= since_s]
    return [later - earlier for earlier, later in pairwise(seen)]


def test_it_looks_each_twenty_seconds_then_each_two_minutes(tmp_path: Path) -> None:
    world = World(Home(tmp_path), lease=LEASE.model_copy(update={"train_s": 7200}))
    world.far.train_s = 1200.0
    cloud = busy(world, float("inf"))
    assert world.drive() is ExitCode.DONE
    early = [at_s for at_s in cloud.listed_s if at_s < 120]
    assert 5 <= len(early) <= 8
    assert all(118 <= gap_s <= 150 for gap_s in gaps(cloud, 150))


def test_too_many_requests_double_the_pause_up_to_ten_minutes(tmp_path: Path) -> None:
    world = World(Home(tmp_path), lease=LEASE.model_copy(update={"train_s": 7200}))
    world.far.train_s = 2600.0
    cloud = busy(world, 200.0)
    assert world.drive() is ExitCode.DONE
    pauses = gaps(cloud, 200.0)
    assert pauses[0] > 230
    assert pauses[1] > 470
    assert all(590 <= gap_s <= 730 for gap_s in pauses[2:])


def test_a_machine_that_its_provider_calls_ill_is_reported_once(world: World) -> None:
    read = world.cloud.read

    def unhealthy(instance_id: str) -> Instance:
        instance = read(instance_id)
        is_up = instance.state is InstanceState.RUNNING and world.clock.monotonic() > 60
        return instance.model_copy(update={"said": "unhealthy"}) if is_up else instance

    world.cloud.read = unhealthy  # type: ignore[method-assign]
    assert world.drive() is ExitCode.BUDGET_STOP
    assert incidents(world) == ["machine.said"]


def test_what_boot_and_upload_did_not_need_is_trained_for(world: World) -> None:
    """Boot and upload took seconds of their planned three minutes: the training gets the rest."""
    assert world.drive() is ExitCode.BUDGET_STOP
    job = world.all_of(Event.TRAIN_INTENDED)[0]
    began_wall = next(record.wall for record in world.records if record.event is Event.TRAIN_INTENDED)
    assert job["soft_stop_wall"] - began_wall > LEASE.train_s + 60
    assert kept(world)


def test_hours_that_the_user_named_are_not_made_more(tmp_path: Path) -> None:
    world = World(Home(tmp_path), lease=LEASE.model_copy(update={"hours_s": 200}))
    world.far.train_s = 1e6
    world.drive()
    job = world.all_of(Event.TRAIN_INTENDED)[0]
    began_wall = next(record.wall for record in world.records if record.event is Event.TRAIN_INTENDED)
    assert job["soft_stop_wall"] - began_wall == pytest.approx(200, abs=1)


def test_checkpoints_slower_than_planned_are_begun_earlier(world: World) -> None:
    """On a slow line training stops earlier, to download in time, but at least half of the planned training is kept."""

    def slow() -> None:
        Inventory(world.folder).note(bytes_per_s=100.0)

    world.far.during = slow
    assert world.drive() is ExitCode.BUDGET_STOP
    planned_wall = world.all_of(Event.TRAIN_INTENDED)[0]["hard_stop_wall"]
    assert world.far.shortened
    assert world.far.shortened[0][1] == pytest.approx(planned_wall - (LEASE.train_s / 2 - LEASE.collect_s), abs=2)
    assert kept(world)


def test_a_home_copied_before_its_create_rents_no_second_machine(tmp_path: Path) -> None:
    """A home is copied before the create, and both copies drive the run.

    The second must find the machine and rent none.
    """
    first = World(Home(tmp_path / "home"))
    assert first.home.id
    copytree(first.home.root, tmp_path / "copy")
    first.cloud.killing = "before far.poll"
    assert first.drive() == "killed"
    copy = World(Home(tmp_path / "elsewhere"))
    copy.home, copy.folder, copy.cloud = Home(tmp_path / "copy"), Home(tmp_path / "copy").run("fox-41"), first.cloud
    assert copy.drive() is ExitCode.RUN_HELD
    assert first.cloud.created == 1
    assert [box.died_s for box in first.cloud.boxes] == [None]


def test_the_same_run_of_another_home_is_no_twin(tmp_path: Path) -> None:
    first, other = World(Home(tmp_path / "one")), World(Home(tmp_path / "two"))
    first.cloud.killing = "before far.poll"
    assert first.drive() == "killed"
    other.cloud, other.clock, other.far.cloud, other.far.clock = first.cloud, first.clock, first.cloud, first.clock
    assert other.drive() is ExitCode.DONE


def test_a_run_another_machine_opened_continues_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home is synced between two laptops, and the other one may still drive the run.

    Resuming here needs `--here`.
    """
    world = World(Home(tmp_path))
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    sight = look_at_run(world.home, "fox-41")
    confirm_resume_here(Session(home=world.home), sight)
    monkeypatch.setattr("gpurun.cli.run_control.machine_id", lambda: "another")
    with refusal(UsageError, "input.needed", "fox-41", "--here"):
        confirm_resume_here(Session(home=world.home), sight)


def test_a_twice_risen_price_is_paid_for_as_long_as_each_stood(world: World) -> None:
    prices = ((0.0, RATE), (60.0, usd(3)), (130.0, usd(4)))

    def rising(verb: str) -> Micros:
        return next(price for since_s, price in reversed(prices) if world.clock.monotonic() >= since_s)

    world.cloud.reported_rate = rising
    assert world.drive() is ExitCode.BUDGET_STOP
    (box,) = world.cloud.boxes
    ends_s = [since_s for since_s, _ in prices[1:]] + [box.died_s or 0.0]
    paid = total(*(cost_of(price, end_s - since_s) for (since_s, price), end_s in zip(prices, ends_s, strict=True)))
    assert incidents(world) == ["price.rose", "price.rose"]
    assert paid <= (world.plan.cap_micros or 0)


def test_an_incident_of_a_run_at_work_is_no_failed_end(world: World) -> None:
    """A note during a run must not turn `ps` and `audit` red; an end that could not be proven must."""
    world.cloud.reported_rate = lambda verb: usd(4) if world.clock.monotonic() >= 60 else RATE
    seen: list[str] = []

    def look_in() -> None:
        if world.records[-1].event is Event.INCIDENT:
            seen.append(gave_up(look_at_run(world.home, "fox-41")))

    world.far.during = look_in
    assert world.drive() is ExitCode.BUDGET_STOP
    assert seen
    assert set(seen) == {""}


def test_an_unanswered_look_ships_nothing_beside_a_duplicate(world: World) -> None:
    """The list that would show two machines is lost. gpurun must upload nothing until a later list shows only one."""
    capped(world, 2)
    world.cloud.creates, world.cloud.list_lag_s = ["made twice"], 15.0
    world.cloud.profile = replace(world.cloud.profile, boot_s=30.0, timeout_s=30.0)
    world.cloud.script["find"] = [Fault.NONE, Fault.NONE, Fault.DROPPED]
    alive: set[int] = set()
    world.far.during = lambda: alive.add(len(world.cloud.alive))
    world.drive()
    assert alive == {1}
