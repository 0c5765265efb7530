"""Tests of why a machine stopped: a request of this home outranks a loss, and a machine that moved stays in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.money import Micros
from gpurun.core.paths import Home
from gpurun.core.records import Account, Address, Instance
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger.audit import audit
from gpurun.providers.base import Unknown
from gpurun.remote.interface import MachineLost
from gpurun.remote.messages import Manifest
from gpurun.view.event_text import tell_record
from tests.lifecycle.scripted_cloud import World
from tests.refusals import lacking


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def at_poll(world: World, number: int, what: object) -> None:
    def during() -> None:
        if world.far.polls == number and callable(what):
            what()

    world.far.during = during


def take(world: World) -> None:
    world.cloud.boxes[0].died_s = world.cloud.now


def words_of(world: World) -> str:
    return world.folder.journal.read_text() + world.folder.receipt.read_text()


def test_a_supervisor_awake_after_our_own_destroy_accuses_no_one(world: World) -> None:
    def destroyed_while_frozen() -> None:
        ask_to_stop(world.folder, "destroy", by="user", reason="gpurun destroy")
        take(world)

    at_poll(world, 3, destroyed_while_frozen)
    assert world.drive() is ExitCode.INTERRUPTED
    assert world.all_of(Event.STOP_REQUESTED)[0]["how"] == "destroy"
    assert world.all_of(Event.TRAIN_OBSERVED) == []
    assert "machine.lost" not in words_of(world)


def test_a_supervisor_awake_after_the_timer_says_lease_is_over(world: World) -> None:
    def slept_past_the_lease() -> None:
        take(world)
        world.clock.sleep(3600.0)

    at_poll(world, 3, slept_past_the_lease)
    assert world.drive() is ExitCode.BUDGET_STOP
    assert world.all_of(Event.STOP_REQUESTED)[0]["by"] == "lease"
    assert "lost" not in [seen["outcome"] for seen in world.all_of(Event.TRAIN_OBSERVED)]
    assert "machine.lost" not in words_of(world)


def moved(world: World, monkeypatch: pytest.MonkeyPatch, *, survives: bool) -> None:
    """At the third poll, move the machine to another port, where only it answers.

    The training survives if `survives`.
    """
    was_moved: list[float] = []
    read, poll, reach = world.cloud.read, world.far.poll, world.reach

    def read_moved(identifier: str) -> Instance:
        machine = read(identifier)
        port = 10_022 if was_moved else 22
        return machine.model_copy(update={"address": Address(kind="ssh", host="127.0.0.1", port=port, user="root")})

    def reach_at(instance: Instance):  # type: ignore[no-untyped-def]
        is_right = not was_moved or (instance.address is not None and instance.address.port == 10_022)
        world.far.broken = {} if is_right else dict.fromkeys(("poll", "manifest"), MachineLost("nobody answers at 22"))
        return reach(instance)

    def poll_there(wants):  # type: ignore[no-untyped-def]
        answer = poll(wants)
        if was_moved and not survives:
            status = answer.status.model_copy(update={"wall": was_moved[0], "state": "running", "exit_code": None})
            return type(answer)(status, answer.chunks)
        return answer

    def move() -> None:
        was_moved.append(world.clock.wall())
        world.far.broken = {"poll": MachineLost("nobody answers at 22")}

    monkeypatch.setattr(world.cloud, "read", read_moved)
    monkeypatch.setattr(world.far, "poll", poll_there)
    world.reach = reach_at
    at_poll(world, 3, move)


def test_a_machine_back_at_another_port_trains_to_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    moved(world, monkeypatch, survives=True)
    assert world.drive() is ExitCode.DONE
    (incident,) = world.all_of(Event.INCIDENT)
    assert incident["code"] == "machine.moved"
    assert incident["instance"]["address"]["port"] == 10_022
    assert [row.problems for row in audit(world.home).rows] == [()]


def test_finished_work_comes_home_from_a_restarts_new_port(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    moved(world, monkeypatch, survives=False)
    manifest, cuts = world.far.manifest, [MachineLost("the line was cut")]

    def cut_once(most_bytes: int) -> Manifest:
        if cuts:
            raise cuts.pop()
        return manifest(most_bytes)

    monkeypatch.setattr(world.far, "manifest", cut_once)
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert world.state.outcome == "lost"
    assert "000030.model.safetensors" in world.at_home
    assert not world.cloud.alive


def test_a_balance_that_is_used_up_is_named_as_the_cause(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(provider="local", identity="me", balance_micros=Micros(0))
    monkeypatch.setattr(world.cloud, "verify", lambda: account)
    at_poll(world, 3, lambda: take(world))
    assert world.drive() is ExitCode.TRAINING_FAILED
    (seen,) = world.all_of(Event.TRAIN_OBSERVED)
    assert lacking(seen["message"], "balance", "local", "$0.00") == []


def test_only_a_request_that_was_taken_counts_as_asked_to_die(world: World) -> None:
    refusals = [Unknown("503"), Unknown("503"), None]
    destroy = world.cloud.destroy

    def refusing(identifier: str) -> None:
        if (refusal := refusals.pop(0) if refusals else None) is not None:
            raise refusal
        destroy(identifier)

    world.cloud.destroy = refusing  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    requests = [record for record in world.records if record.event is Event.DESTROY_ASKED]
    assert [record.data["taken"] for record in requests] == [False, False, True]
    assert ["503" in tell_record(record) for record in requests] == [True, True, False]
