"""Tests of the fault matrix between create and ready, where a machine is not the one that was ordered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import ExitCode, SetupError
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import Instance, Order
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger import journal
from gpurun.ledger.audit import audit
from gpurun.lifecycle import supervisor
from gpurun.providers.base import Unknown
from gpurun.remote.interface import MachineLost
from gpurun.remote.machine_facts import CardFacts, Gpu, MachineFacts, Torch
from gpurun.remote.ssh import HostKeyMismatch
from tests.changed_plan import changed_plan
from tests.lifecycle.drive import TINY
from tests.lifecycle.faults import ended, kept
from tests.lifecycle.scripted_cloud import LEASE, Killed, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def change_facts(world: World, **changes: Any) -> None:
    """Make the agent report the machine's facts with these changes."""
    hello = world.far.hello

    def changed_hello(python: str | None = None, **_: Any) -> MachineFacts:
        return hello(python).model_copy(update=changes)

    world.far.hello = changed_hello  # type: ignore[method-assign]


def one_card(name: str, gigabytes: int) -> Torch:
    card = Gpu(name=name, memory_bytes=gigabytes << 30)
    return Torch(found=True, python="/py", version="2.13", numpy="2.1", cuda="13.0", devices=(card,))


def test_an_sshd_that_refuses_at_first_is_waited_for(world: World) -> None:
    world.far.broken, world.far.broken_times = {"install_agent": MachineLost("refuses")}, {"install_agent": 6}
    assert world.drive() is ExitCode.DONE
    (ready,) = world.all_of(Event.READY_OBSERVED)
    assert 6 * world.cloud.traits.poll_s <= ready["seconds"] <= LEASE.boot_s
    assert kept(world)


def test_another_host_key_ends_the_rental_with_nothing_sent(world: World) -> None:
    world.far.broken["install_agent"] = HostKeyMismatch("203.0.113.9:22", "SHA256:ours", "SHA256:theirs")
    assert world.drive() is ExitCode.BUG
    assert world.state.failure.code == "ssh.host_key_mismatch"
    assert not world.all_of(Event.READY_OBSERVED)
    assert not world.all_of(Event.SHIP_INTENDED)
    assert (world.cloud.boxes[0].died_s or 0) < LEASE.boot_s, "it is not tried again until the boot limit"
    assert kept(world)


WRONG = {
    "another card": ({"torch": one_card("Tesla T4", 16)}, "box.other_gpu"),
    "a slice of the card": ({"torch": one_card("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10)}, "box.less_memory"),
    "lost bits": (
        {"gpus": (CardFacts(name="NVIDIA A100-SXM4-80GB", memory_bytes=80 << 30, driver="570", ecc_errors=3),)},
        "box.ecc_errors",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_machine_not_as_ordered_is_refused_before_the_upload(world: World, wrong: str) -> None:
    changes, code = WRONG[wrong]
    offer = world.plan.offer.model_copy(update={"vram_gb": 80})
    world.folder.plan.write_text(changed_plan(world.plan, {"offer": offer}).to_json())
    change_facts(world, **changes)
    assert world.drive() is ExitCode.NO_OFFER
    assert world.state.failure.code == code
    assert not world.all_of(Event.SHIP_INTENDED)
    assert kept(world)


def test_a_read_under_another_token_is_not_taken_for_the_machine(world: World) -> None:
    """If the cloud's answer about the machine has another run's token, gpurun must not upload to it."""
    read = world.cloud.read

    def read_with_other_token(instance_id: str) -> Instance:
        return read(instance_id).model_copy(update={"token": "gr-other-1"})

    world.cloud.read = read_with_other_token  # type: ignore[method-assign]
    assert world.drive() is ExitCode.NO_OFFER
    assert world.state.failure.code == "boot.timeout"
    assert not world.all_of(Event.SHIP_INTENDED)
    assert ended(world)


def test_the_next_of_kin_in_a_list_is_neither_adopted_nor_ended(world: World) -> None:
    """A provider's search may also return runs with similar names.

    Only a machine with exactly this run's token counts.
    """
    find = world.cloud.find
    order = Order(run="fox-4", token="gr-fox-4-0", attempt=1, offer=world.plan.offer, deadline_wall=9e9)
    stranger = world.cloud.create(order)

    def loose(token: str | None) -> list[Instance]:
        return [stranger, *find(token)] if not world.all_of(Event.DESTROY_INTENDED) else find(token)

    world.cloud.find = loose  # type: ignore[method-assign]
    world.cloud.creates = ["made, answer lost"]
    assert world.drive() is ExitCode.DONE
    assert [box.id for box in world.cloud.alive] == [stranger.id]
    assert not [incident for incident in world.all_of(Event.INCIDENT) if incident["code"] == "create.duplicate"]
    assert [row.problems for row in audit(world.home).rows] == [()]


@pytest.mark.parametrize("broken", ["fsync", "lock"])
def test_where_nothing_can_ever_be_written_nothing_is_asked_for(
    world: World, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a working fsync or lock, the record of a machine could be lost: gpurun must not call the cloud."""
    monkeypatch.setattr(supervisor, "open_provider", lambda name, **_: world.cloud)
    if broken == "fsync":

        def refuses(descriptor: int) -> None:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr("os.fsync", refuses)
    else:
        monkeypatch.setattr("gpurun.ledger.fsync.take_lock", lambda descriptor: True)
    with pytest.raises(SetupError) as refused:
        supervisor.supervise(world.home, "fox-41", world.clock, reach=lambda _: world.far, trainer=TINY / "trainer")
    assert refused.value.code == "home.not_durable"
    assert world.cloud.history == []


def test_a_create_intended_before_sleep_is_not_sent_hours_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The laptop sleeps for hours before it sends a create.

    The deadline in that create is then over: it must not be sent.
    """
    real = journal.crashpoint

    def asleep(place: str) -> None:
        if place == "after create.intended":
            monkeypatch.setattr(journal, "crashpoint", real)
            world.clock.sleep(4 * 3600)

    monkeypatch.setattr(journal, "crashpoint", asleep)
    assert world.drive() is ExitCode.DONE
    first, second = world.all_of(Event.CREATE_INTENDED)
    assert second["deadline_wall"] - first["deadline_wall"] >= 4 * 3600
    assert [data["reason"] for data in world.all_of(Event.CREATE_REFUSED)] == ["not_sent"]
    assert world.cloud.created == 1
    assert kept(world)


def answers_the_second_time(world: World, *, after_s: float = 0.0) -> list[str]:
    """Lose the answer to each create, which gpurun may then send again.

    Return a list that gets the tokens of the resends.
    """
    create, sent = world.cloud.create, list[str]()

    def lost(order: Order) -> Instance:
        made = create(order)

        def again() -> Instance:
            sent.append(order.token)
            return made

        world.clock.sleep(after_s)
        raise Unknown("no answer", again=again)

    world.cloud.create = lost  # type: ignore[method-assign]
    return sent


def test_an_idempotent_request_is_sent_again_at_once(world: World) -> None:
    sent = answers_the_second_time(world)
    assert world.drive() is ExitCode.DONE
    assert sent == [world.all_of(Event.CREATE_INTENDED)[0]["token"]]
    assert [data["adopted"] for data in world.all_of(Event.CREATE_OBSERVED)] == [False]
    assert kept(world)


@pytest.mark.parametrize("why", ["a minute later", "a stop was asked for", "on resume"])
def test_no_create_is_sent_again_late_after_a_stop_or_on_resume(
    world: World, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = answers_the_second_time(world, after_s=61.0 if why == "a minute later" else 0.0)

    def point(place: str) -> None:
        if place == "after create.unknown" and why == "on resume":
            raise Killed(place)
        if place == "before create.unknown" and why == "a stop was asked for":
            ask_to_stop(world.folder, "save", by="user", reason="a test")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "crashpoint", point)
        world.drive()
    world.drive()
    assert sent == []
    assert [data["adopted"] for data in world.all_of(Event.CREATE_OBSERVED)] == [True]
    assert ended(world)


def test_one_lost_answer_restarts_the_two_minutes_of_absence(world: World) -> None:
    world.cloud.creates = ["dropped"]
    find, silent_s = world.cloud.find, 100.0

    def lost_once(token: str | None) -> list[Instance]:
        nonlocal silent_s
        if world.cloud.now >= silent_s:
            silent_s = float("inf")
            raise Unknown("504 Gateway Timeout")
        return find(token)

    world.cloud.find = lost_once  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    first, second = (record for record in world.records if record.event is Event.CREATE_INTENDED)
    assert second.mono - first.mono >= 100.0 + world.cloud.traits.settle_s
    assert kept(world)


def test_a_slowly_dying_duplicate_is_waited_for_before_shipping(world: World) -> None:
    world.cloud.profile = replace(world.cloud.profile, dying_s=40.0)
    world.cloud.creates = ["made twice"]
    alive: list[int] = []
    unpack = world.far.unpack

    def counted(*given: Any, **named: Any) -> Any:
        alive.append(len(world.cloud.alive))
        return unpack(*given, **named)

    world.far.unpack = counted  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert alive == [1]
    assert kept(world)


def test_a_duplicate_listed_long_after_death_delays_nothing(world: World) -> None:
    world.cloud.profile = replace(world.cloud.profile, tomb_s=3600.0)
    world.cloud.creates = ["made twice"]
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    assert kept(world)


def test_a_machine_found_dead_by_token_costs_and_gets_no_second(world: World) -> None:
    """A dead machine that the cloud still lists did exist. gpurun must not take it for absent and rent another one."""
    world.cloud.profile = replace(world.cloud.profile, tomb_s=3600.0)
    world.cloud.killing = "after create"
    assert world.drive() == "killed"
    world.clock.sleep(60.0)
    world.cloud.boxes[0].died_s = world.cloud.now
    assert world.drive() is ExitCode.NO_OFFER
    assert world.cloud.created == 1
    assert world.all_of(Event.RUN_CLOSED)
    assert kept(world)
