"""Tests of the fault matrix: what a cloud, an instance or a clock may do between a create and the proof of death.

Every test runs in virtual time on a cloud with its own meter. Whatever happens, `kept` holds: no machine is left
without a report, no run costs more than its cap, and no receipt states less than the meter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpurun.core.errors import ExitCode, MayBeBilling, SetupError
from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import Instance, InstanceState, Order
from gpurun.core.stop_request import ask_to_stop, read_stop_request
from gpurun.ledger.journal import Journal
from gpurun.lifecycle.driver import Driver
from gpurun.lifecycle.reaper import sweep
from gpurun.providers.base import Unknown
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import Started
from tests.changed_plan import changed_plan
from tests.emulators.fake import Box
from tests.lifecycle.faults import ended, kept, receipt_of
from tests.lifecycle.scripted_cloud import LEASE, World


@pytest.fixture
def world(own: Home) -> World:
    return World(own)


REVOKED = SetupError("key.revoked", "The key is not accepted any more.", hint="Make a new one.")
SILENT = Unknown("504 Gateway Timeout")
GONE, RUNNING = InstanceState.GONE, InstanceState.RUNNING


def test_a_paid_run_comes_home_and_costs_what_its_receipt_says(world: World) -> None:
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    assert kept(world)


# plan


def test_a_worst_case_over_the_cap_asks_for_nothing(world: World) -> None:
    world.folder.plan.write_text(world.plan.model_copy(update={"cap_micros": usd("0.01")}).to_json())
    assert world.drive() is ExitCode.NO_OFFER
    assert world.cloud.created == 0


# provision


@pytest.mark.parametrize("place", ["before create", "after create"])
def test_killed_around_the_send_there_is_one_instance_in_the_end(world: World, place: str) -> None:
    world.cloud.killing = place
    assert world.drive() == "killed"
    assert world.state.may_be_billing
    assert world.drive() is ExitCode.DONE
    assert len(world.cloud.boxes) == 1
    assert kept(world)


@pytest.mark.parametrize("how", ["made, answer lost", "made, answer of another"])
@pytest.mark.parametrize("list_lag_s", [0.0, 100.0])
def test_a_lost_or_strange_answer_is_looked_up_and_adopted(world: World, how: str, list_lag_s: float) -> None:
    world.cloud.creates, world.cloud.list_lag_s = [how], list_lag_s
    assert world.drive() is ExitCode.DONE
    assert (world.cloud.created, len(world.cloud.boxes)) == (1, 1)
    assert kept(world)


def test_the_readable_part_of_a_list_is_adopted_at_once(world: World) -> None:
    """The create's answer is lost, and each list breaks off after its first page.

    A machine on that page must be adopted.
    """
    world.cloud.creates = ["made, answer lost"]
    find = world.cloud.find

    def first_page(token: str | None) -> list[Instance]:
        if world.clock.monotonic() < 3600 and world.cloud.created:
            raise Unknown("the next page cannot be had", found=tuple(find(token)))
        return find(token)

    world.cloud.find = first_page  # type: ignore[method-assign]
    world.drive()
    assert len(world.cloud.boxes) == 1
    adopted = next(record for record in world.records if record.event is Event.CREATE_OBSERVED)
    assert adopted.data["adopted"]
    assert adopted.mono < 60


@pytest.mark.parametrize("how", ["made, answer broken", "made, key revoked"])
def test_a_create_that_fails_after_making_is_found_and_destroyed(world: World, how: str) -> None:
    world.cloud.creates = [how]
    assert world.drive() in (ExitCode.BUG, ExitCode.SETUP)
    assert len(world.cloud.boxes) == 1
    assert kept(world)


def test_a_dropped_request_waits_two_minutes_of_steady_lists(world: World) -> None:
    world.cloud.creates = ["dropped"]
    assert world.drive() is ExitCode.DONE
    intents = [record for record in world.records if record.event is Event.CREATE_INTENDED]
    assert intents[1].mono - intents[0].mono >= world.cloud.traits.settle_s
    assert kept(world)


def no_list_since_the_create(world: World, error: Exception) -> None:
    create = world.cloud.create

    def created(order: Order) -> Instance:
        world.cloud.broken["find"] = error
        return create(order)

    world.cloud.create = created  # type: ignore[method-assign]


def test_one_clear_list_after_silence_is_not_two_clear_minutes(world: World) -> None:
    world.cloud.creates, world.cloud.list_lag_s = ["made, answer lost"], 200.0
    no_list_since_the_create(world, SILENT)
    real_sleep = world.clock.sleep

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if world.clock.monotonic() > 118:
            world.cloud.broken.clear()

    world.clock.sleep = sleep  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert world.cloud.created == 1, "the list was steady for two seconds when its two minutes were over"
    assert kept(world)


@pytest.mark.parametrize("error", [SILENT, REVOKED, KeyError("items")])
def test_who_cannot_look_stays_red_and_goes_on_when_it_can(world: World, error: Exception) -> None:
    world.cloud.creates = ["made, answer lost"]
    no_list_since_the_create(world, error)
    assert isinstance(world.drive(), str)
    assert world.state.may_be_billing
    assert world.records[-1].event is Event.INCIDENT
    world.cloud.broken.clear()
    assert world.drive() in (ExitCode.DONE, ExitCode.BUG)
    assert len(world.cloud.boxes) == 1
    assert kept(world)


@pytest.mark.parametrize("how", ["no capacity", "rejected"])
def test_a_definite_no_costs_nothing(world: World, how: str) -> None:
    world.cloud.creates = [how]
    assert world.drive() is ExitCode.NO_OFFER
    assert world.cloud.metered() == 0
    assert kept(world)


def test_a_duplicate_ends_before_anything_is_shipped(world: World) -> None:
    world.cloud.creates = ["made twice"]
    ends: list[int] = []
    world.far.during = lambda: ends.append(len(world.cloud.alive))
    assert world.drive() is ExitCode.DONE
    assert set(ends) == {1}, "no second machine is paid for while the first one trains"
    assert world.cloud.boxes[0].died_s != world.cloud.boxes[1].died_s
    codes = [incident["code"] for incident in world.all_of(Event.INCIDENT)]
    assert codes == ["create.duplicate", "create.duplicate_gone"]
    assert kept(world)


@pytest.mark.parametrize("verb", ["create", "read"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_higher_rate_is_refused_whenever_it_is_reported(world: World, verb: str, killed: bool) -> None:
    world.cloud.rate = usd(3)
    world.cloud.reported_rate = lambda called: usd(3) if verb in (called, "create") or called == "find" else None
    world.cloud.killing = "after create" if killed else ""
    if killed:
        assert world.drive() == "killed"
    assert world.drive() is ExitCode.NO_OFFER
    assert not world.all_of(Event.SHIP_INTENDED)
    assert kept(world)


def test_a_recorded_price_rise_is_still_refused_after_a_kill(world: World) -> None:
    world.cloud.rate, world.cloud.reported_rate = usd(3), lambda verb: usd(3)
    world.cloud.killing = "before find"  # The first call after create.observed.
    world.drive()
    world.drive()
    assert world.state.exit_code == ExitCode.NO_OFFER
    assert not world.all_of(Event.SHIP_INTENDED)
    assert kept(world)


def test_another_gpu_than_the_one_agreed_to_is_destroyed(world: World) -> None:
    world.cloud.gpu = "T4"
    assert world.drive() is ExitCode.NO_OFFER
    assert world.state.failure.code == "gpu.other"
    assert kept(world)


@pytest.mark.parametrize("verbs", [("create", "find", "read"), ("read",)])
@pytest.mark.parametrize(("wanted", "reported"), [("EU-RO-1", "US-KS-2"), ("EU-RO-1", ""), ("any", "US-KS-2")])
def test_a_machine_in_another_place_than_ordered_is_sent_nothing(
    world: World, wanted: str, reported: str, verbs: tuple[str, ...]
) -> None:
    """RunPod may ignore the requested data centre, but the user may be obliged to stay in it.

    Nothing must be uploaded.
    """
    world.folder.plan.write_text(
        changed_plan(world.plan, {"offer": world.plan.offer.model_copy(update={"region": wanted})}).to_json()
    )
    place = world.cloud._told

    def placed(box: Box, at_s: float, verb: str) -> Instance:
        return place(box, at_s, verb).model_copy(update={"region": reported if verb in verbs else ""})

    world.cloud._told = placed  # type: ignore[method-assign]
    is_another = bool(reported) and wanted != "any"
    assert world.drive() is (ExitCode.NO_OFFER if is_another else ExitCode.DONE)
    assert bool(world.all_of(Event.SHIP_INTENDED)) is not is_another
    assert getattr(world.state.failure, "code", None) == ("region.other" if is_another else None)
    assert kept(world)


def test_a_silent_agent_is_given_up_within_the_boot_limit(world: World) -> None:
    world.far.broken["hello"] = MachineLost("refused")
    assert world.drive() is ExitCode.NO_OFFER
    assert world.clock.monotonic() < LEASE.boot_s + 60
    assert kept(world)


def test_a_death_at_birth_is_reported_in_the_providers_words(world: World) -> None:
    """EC2 may accept a launch and end the machine a second later.

    The user must see EC2's reason, such as a volume limit.
    """
    why, read = "terminated · Client.VolumeLimitExceeded: Volume limit exceeded", world.cloud.read

    def stillborn(instance_id: str) -> Instance:
        return read(instance_id).model_copy(update={"state": InstanceState.GONE, "said": why})

    world.cloud.read = stillborn  # type: ignore[method-assign]
    assert world.drive() is ExitCode.NO_OFFER
    assert why in world.state.failure.message
    assert kept(world)


# ship and run


def test_a_line_that_breaks_while_shipping_is_tried_again(world: World) -> None:
    world.far.broken = {"unpack": FarRefusal("cut_stream", "cut"), "start": FarRefusal("busy", "held")}
    world.far.broken_times = {"unpack": 2, "start": 2}
    assert world.drive() is ExitCode.DONE
    assert kept(world)


def test_one_answer_that_makes_no_sense_ends_no_training(world: World) -> None:
    world.far.broken, world.far.broken_times = {"poll": FarRefusal("broken", "out of memory")}, {"poll": 5}
    assert world.drive() is ExitCode.DONE
    assert kept(world)


def test_an_agent_of_endless_nonsense_is_left_and_files_come(
    world: World,
) -> None:
    world.far.broken["poll"] = FarRefusal("nonsense", "what?")
    assert isinstance(world.drive(), ExitCode)
    assert len(world.at_home) == 3
    assert kept(world)


def test_a_far_file_that_overstates_its_length_blocks_nothing(world: World) -> None:
    world.far.behind = 1000
    assert world.drive() is ExitCode.DONE
    assert kept(world)


def test_an_unreachable_machine_is_not_dead_by_one_read_of_gone(world: World) -> None:
    world.far.broken, world.far.broken_times = {"poll": MachineLost("no route")}, {"poll": 5}
    world.far.during = lambda: world.cloud.reads.extend([GONE] * (not world.cloud.reads))
    assert world.drive() is ExitCode.DONE
    assert world.state.outcome == "done"
    assert kept(world)


def test_a_key_revoked_while_the_line_is_down_ends_no_training(world: World) -> None:
    world.far.broken, world.far.broken_times = {"poll": MachineLost("no route")}, {"poll": 5}

    def revoke_for_a_while() -> None:
        world.cloud.broken = {"read": REVOKED} if world.far.polls <= 5 else {}

    world.far.during = revoke_for_a_while
    assert world.drive() is ExitCode.DONE
    assert kept(world)


def test_a_lost_running_machine_is_destroyed_and_not_called_done(world: World) -> None:
    world.far.broken["poll"] = MachineLost("no route")
    assert world.drive() is ExitCode.BUDGET_STOP
    assert (world.cloud.boxes[0].died_s or 0) <= LEASE.total_s
    assert kept(world)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_an_hour_never_lengthens_the_lease(world: World, jump_s: float) -> None:
    world.far.train_s = 1e9
    world.far.during = lambda: world.clock.jump_wall(jump_s) if world.far.polls == 3 else None
    assert world.drive() is ExitCode.BUDGET_STOP
    assert (world.cloud.boxes[0].died_s or 0) <= LEASE.total_s
    assert ended(world)


@pytest.mark.parametrize("killing", ["before far.hello", "before far.unpack", "before far.poll"])
def test_a_slow_clock_after_a_restart_never_lengthens_the_lease(
    world: World, monkeypatch: pytest.MonkeyPatch, killing: str
) -> None:
    """After a restart this computer's clock may be wrong: gpurun must rely on the times in the provider's answers."""
    start, jobs = world.far.start, list[Mapping[str, Any]]()

    def started(job: Mapping[str, Any]) -> Started:
        jobs.append(job)
        return start(job)

    world.far.train_s, world.cloud.killing = 1e9, killing
    world.far.start = started  # type: ignore[method-assign]
    assert world.drive() == "killed"
    monkeypatch.setattr("gpurun.lifecycle.context.boot_id", lambda: "after the restart")
    monkeypatch.setattr("gpurun.ledger.journal.boot_id", lambda: "after the restart")
    world.clock.jump_wall(-3 * 3600.0)
    assert world.drive() is ExitCode.BUDGET_STOP
    assert (world.cloud.boxes[0].died_s or 0) <= LEASE.total_s
    assert all(job["hard_stop_s"] < LEASE.total_s for job in jobs), "nor is the machine told so"
    assert len(world.at_home) == 3
    assert world.cloud.alive == []


def test_a_provider_without_a_clock_keeps_no_machine_overdue(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the provider's time cannot be read after a restart, the lease must still end, by this computer's clock."""

    def odd() -> None:
        raise ValueError("no date at all")

    world.far.train_s, world.cloud.killing = 1e9, "before far.poll"
    assert world.drive() == "killed"
    monkeypatch.setattr("gpurun.lifecycle.context.boot_id", lambda: "after the restart")
    monkeypatch.setattr(world.cloud, "ask_time", odd)
    assert world.drive() is ExitCode.BUDGET_STOP
    assert (world.cloud.boxes[0].died_s or 0) <= LEASE.total_s
    assert kept(world)


def test_a_provider_time_from_a_restart_ends_no_later_machine(world: World) -> None:
    context = replace(world.context, ends_mono=world.clock.monotonic())
    assert Driver(context, Journal.open(world.folder.journal, world.clock)).drive() is ExitCode.DONE


@pytest.mark.parametrize("wrong_s", [3600.0, -3600.0])
def test_a_laptop_whose_clock_is_wrong_rents_for_the_same_time(world: World, wrong_s: float) -> None:
    true_wall, deadlines_wall = world.clock.wall(), set()

    def reach(instance: Instance) -> FarSide:
        deadlines_wall.add(instance.deadline_wall)
        return world.far

    world.clock.jump_wall(wrong_s)
    context = replace(world.context, reach=reach)
    assert Driver(context, Journal.open(world.folder.journal, world.clock)).drive() is ExitCode.DONE
    (box,) = world.cloud.boxes
    assert box.order.deadline_wall == pytest.approx(true_wall + LEASE.total_s, abs=1), "the machine's clock is right"
    assert deadlines_wall == {world.state.deadline_wall}, "what is called waits until then by this machine's clock"
    assert world.state.deadline_wall == pytest.approx(true_wall + wrong_s + LEASE.total_s, abs=1)
    assert kept(world)


@pytest.mark.parametrize("place", ["far.unpack", "far.poll", "far.manifest"])
def test_a_laptop_asleep_past_the_deadline_destroys_with_exit_7(world: World, place: str) -> None:
    world.cloud.killing = f"before {place}"
    assert world.drive() == "killed"
    world.clock.sleep(4 * 3600)
    world.cloud.boxes[0].died_s = LEASE.total_s  # The timer on the machine ended it.
    assert world.drive() is ExitCode.BUDGET_STOP
    assert ended(world)


def test_a_lease_that_is_over_stays_over_if_the_clock_goes_back(world: World) -> None:
    world.cloud.killing = "before far.poll"
    world.drive()
    world.clock.jump_wall(3600)
    world.cloud.killing = "before destroy"
    assert world.drive() == "killed"
    world.clock.jump_wall(-3600)
    assert world.drive() is ExitCode.BUDGET_STOP
    assert ended(world)


@pytest.mark.parametrize("place", ["create", "far.hello", "far.unpack", "far.start", "far.poll", "far.manifest"])
@pytest.mark.parametrize("how", ["save", "now", "destroy"])
def test_a_stop_is_heard_in_every_phase(world: World, place: str, how: Any) -> None:
    world.cloud.killing = f"before {place}"
    assert world.drive() == "killed"
    ask_to_stop(world.folder, how, by="user", reason="test")
    assert world.drive() in (ExitCode.INTERRUPTED, ExitCode.DONE)
    assert kept(world)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"how": "banana", "by": "x", "reason": ""}', b"\0\0\0"])
def test_an_unreadable_control_file_stops_the_run_gently(world: World, content: bytes) -> None:
    world.far.train_s = 1e9
    world.far.during = lambda: world.folder.control.write_bytes(content) if world.far.polls == 3 else None
    assert world.drive() is ExitCode.DONE
    assert world.state.outcome == "stopped"
    assert len(world.at_home) == 3
    ask_to_stop(world.folder, "destroy", by="user", reason="a stronger request replaces it")
    assert getattr(read_stop_request(world.folder), "how", "") == "destroy"
    assert kept(world)


# collect


def test_one_file_that_is_refused_takes_no_other_with_it(world: World) -> None:
    world.far.broken["get checkpoints/000020.model.safetensors"] = FarRefusal("no_such_file", "gone")
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert len(world.all_of(Event.COLLECT_OBSERVED)[0]["files"]) == len(world.at_home) == 2
    assert kept(world)


def test_files_home_before_the_line_was_lost_are_on_the_receipt(world: World) -> None:
    world.far.broken["get checkpoints/000030.model.safetensors"] = MachineLost("no route")
    assert world.drive() is ExitCode.COLLECT_FAILED
    (collected,) = world.all_of(Event.COLLECT_OBSERVED)
    assert len(collected["files"]) == len(receipt_of(world)["checkpoint"]["files"]) == 2
    assert kept(world)


def test_killed_after_an_incomplete_collect_it_never_succeeds(world: World) -> None:
    world.far.broken["get checkpoints/000020.model.safetensors"] = FarRefusal("no_such_file", "gone")
    world.cloud.killing = "before find"
    assert world.drive() == "killed"
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert kept(world)


def test_a_hostile_manifest_brings_nothing_home_and_is_exit_11(world: World) -> None:
    world.far.broken["manifest"] = FarRefusal("bad_manifest", "../x")
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert world.at_home == set()
    assert kept(world)


def test_an_instance_of_a_byte_a_minute_cannot_hold_its_lease(world: World) -> None:
    world.far.get_s, world.far.get_most = 60.0, 1
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert (world.cloud.boxes[0].died_s or 0) <= LEASE.total_s + LEASE.kill_allowance_s
    assert kept(world)


# destroy


def test_a_destroy_that_says_ok_and_does_nothing_is_asked_again(world: World) -> None:
    world.cloud.deaf_destroys = 3
    assert world.drive() is ExitCode.DONE
    assert len(world.all_of(Event.DESTROY_ASKED)) == 4
    assert kept(world)


def test_an_undying_instance_is_red_and_ends_with_the_next_verb(world: World) -> None:
    world.cloud.deaf_destroys = 1000
    assert world.drive() == "destroy.not_gone"
    assert world.state.may_be_billing
    assert not world.folder.receipt.exists()
    world.cloud.deaf_destroys = 0
    assert world.drive() is ExitCode.DONE
    assert world.cloud.alive == []


def test_an_instance_that_comes_back_voids_the_proof(world: World) -> None:
    world.cloud.reads = []
    world.cloud.deaf_destroys = 1
    world.cloud.broken.clear()
    real_destroy = world.cloud.destroy

    def destroy(instance_id: str) -> None:
        world.cloud.reads = [GONE, GONE, RUNNING]
        real_destroy(instance_id)
        world.cloud.destroy = real_destroy  # type: ignore[method-assign]

    world.cloud.destroy = destroy  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert kept(world)


@pytest.mark.parametrize("error", [SILENT, REVOKED, KeyError("state")])
@pytest.mark.parametrize("verb", ["find", "read", "destroy"])
def test_a_provider_that_fails_to_destroy_leaves_the_run_red(world: World, verb: str, error: Exception) -> None:
    world.cloud.killing = "before destroy"
    assert world.drive() == "killed"
    world.cloud.broken[verb] = error
    assert isinstance(world.drive(), str)
    assert world.state.may_be_billing
    assert world.records[-1].event is Event.INCIDENT
    world.cloud.broken.clear()
    assert world.drive() is ExitCode.DONE
    assert world.cloud.alive == []


def test_an_asking_that_takes_long_is_no_part_of_the_proof(world: World) -> None:
    real_destroy = world.cloud.destroy

    def slow(instance_id: str) -> None:
        real_destroy(instance_id)
        world.clock.sleep(40)

    world.cloud.destroy = slow  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    reads = [record.mono for record in world.records if record.event is Event.DEATH_READ]
    assert reads[-1] - reads[0] >= world.cloud.traits.death_spread_s


def test_a_second_instance_seen_last_is_ended_and_on_the_receipt(world: World) -> None:
    world.cloud.creates = ["made twice"]
    world.cloud.list_lag_s = 70.0
    assert world.drive() is ExitCode.DONE
    (second,) = receipt_of(world)["cost"]["rentals"][0]["extras"]
    assert second["ended"]
    assert ended(world)


def test_killed_in_the_middle_of_destroying_it_asks_again(world: World) -> None:
    world.cloud.killing = "after destroy"
    assert world.drive() == "killed"
    assert world.drive() is ExitCode.DONE
    assert kept(world)


# reap


def reaped(world: World) -> list[str]:
    found = sweep([world.cloud], world.home, world.clock, destroy_all=True, older_than_s=0.0, look_only=False)
    return [orphan.fate for orphan in found]


def test_an_instance_of_a_closed_run_that_lives_again_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.lifecycle.supervisor.open_provider", lambda *_, **__: world.cloud)
    assert world.drive() is ExitCode.DONE
    world.cloud.boxes[0].died_s = None
    assert reaped(world) == ["destroyed"]
    assert world.cloud.alive == []


@pytest.mark.parametrize("file", ["plan", "request"])
def test_an_instance_of_an_unreadable_run_is_ended_by_its_token(world: World, file: str) -> None:
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    getattr(world.folder, file).write_text("{}")
    if file == "request":
        world.folder.journal.unlink()
    assert reaped(world) == ["destroyed"]
    assert world.cloud.alive == []


def test_a_strange_run_name_on_a_machine_stops_no_sweep(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's tag names an impossible run.

    `reap` must find the right run by the token and end it with a receipt.
    """
    monkeypatch.setattr("gpurun.lifecycle.reaper.supervise", lambda home, run, clock: world.drive())
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    box = world.cloud.boxes[0]
    box.order = box.order.model_copy(update={"run": "../../etc"})
    assert reaped(world) == ["destroyed"]
    assert world.folder.receipt.exists()


def test_a_silent_provider_keeps_no_other_from_being_swept(world: World) -> None:
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    world.folder.plan.unlink()
    silent = World(Home(world.home.root / "other")).cloud
    silent.broken["find"] = SILENT
    clouds = [silent, world.cloud]
    with pytest.raises(MayBeBilling):
        list(sweep(clouds, world.home, world.clock, destroy_all=True, older_than_s=0.0, look_only=False))
    assert world.cloud.alive == []
