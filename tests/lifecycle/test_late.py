"""Tests of a machine that appears after gpurun concluded that it did not exist: then its death must be proven too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from gpurun.cli.commands.ps import ps
from gpurun.cli.run_control import find_meant_run, stop_run
from gpurun.cli.session import Session
from gpurun.cli.unfinished import note_unfinished
from gpurun.core.errors import ExitCode, SetupError
from gpurun.core.journal_records import Event, Phase
from gpurun.core.money import format_usd, times, usd
from gpurun.core.paths import Home
from gpurun.core.records import Instance
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import Journal
from gpurun.ledger.write_receipt import write_receipt
from gpurun.lifecycle import supervisor
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.supervisor import keep_on
from gpurun.providers.base import Unknown
from tests.emulators.fake import Fault
from tests.lifecycle.late import codes
from tests.lifecycle.never_gives_up import late_machine, supervised
from tests.lifecycle.scripted_cloud import Killed, ScriptedCloud, World
from tests.refusals import lacking
from tests.unit.ledger_samples import chain_anew


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return a world whose first machine appears after 180 s, when a second machine has already trained."""
    world = World(Home(tmp_path))
    late_machine(world)
    return world


def with_cap_for(world: World, machines: int) -> None:
    """Give the run a cap that pays for this many machines at their worst case."""
    plan = world.plan.model_copy(update={"cap_micros": times(world.plan.worst_micros, machines)})
    world.folder.plan.write_text(plan.to_json())


def late_and_deaf(world: World) -> None:
    """Drive the run until it has recorded the late machine, which ignores its destroy, and the supervisor gives up."""
    destroy = world.cloud.destroy

    def deaf_to_the_late_one(instance_id: str) -> None:
        if "create.late" not in codes(world):
            destroy(instance_id)

    world.cloud.destroy = deaf_to_the_late_one  # type: ignore[method-assign]
    assert world.drive() == "destroy.not_gone"
    world.cloud.destroy = destroy  # type: ignore[method-assign]
    assert len(world.cloud.alive) == 1


def settled(world: World) -> bool:
    """Assert that the run is closed, the late machine's death was proven before the receipt, and the audit is clean."""
    assert world.cloud.alive == []
    assert world.state.phase is Phase.CLOSED
    assert not world.state.may_be_billing
    order = [record.data.get("code", str(record.event)) for record in world.records]
    assert order.index("create.late") < order.index("create.late_gone") < order.index("receipt.observed")
    assert [row.problems for row in audit(world.home).rows] == [()]
    return True


def test_an_outage_after_it_was_seen_is_waited_for(world: World) -> None:
    outages = world.cloud.outages

    def silent_for_half_an_hour(place: str) -> None:
        if place == "before find" and "create.late" in codes(world) and not outages:
            outages.append((world.clock.monotonic(), world.clock.monotonic() + 1800))
        passing(place)

    passing = world.cloud.passing
    world.cloud.passing = silent_for_half_an_hour
    assert keep_on(supervised(world), lambda: world.state.may_be_billing, world.clock) is ExitCode.DONE
    assert outages
    assert settled(world)


@pytest.mark.parametrize("answer", [[], Unknown("503")])
def test_one_list_that_does_not_show_it_makes_it_not_forgotten(world: World, answer: list[Instance] | Unknown) -> None:
    late_and_deaf(world)
    find, tokens, late = world.cloud.find, [], world.cloud.alive[0].order.token

    def at_first(token: str | None) -> list[Instance]:
        tokens.append(token)
        if token == late and tokens.count(token) == 1:
            if isinstance(answer, Unknown):
                raise answer
            return answer
        return find(token)

    world.cloud.find = at_first  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert settled(world)


def test_killed_in_the_proof_the_next_supervisor_proves_it(world: World) -> None:
    passing, died = world.cloud.passing, []

    def dying(place: str) -> None:
        if place == "after destroy" and "create.late" in codes(world) and not died:
            died.append(place)
            raise Killed(place)
        passing(place)

    world.cloud.passing = dying
    assert world.drive() == "killed"
    world.clock.sleep(60)
    assert world.cloud.alive == []
    assert world.state.may_be_billing
    assert world.drive() is ExitCode.DONE
    assert settled(world)


@pytest.mark.parametrize("mark", ["account:simulated", "key:1111"])
def test_its_absence_under_another_accounts_key_is_no_end(world: World, mark: str) -> None:
    world.cloud.account = mark
    late_and_deaf(world)
    right, world.cloud = world.cloud, ScriptedCloud(world.clock)
    world.cloud.account = "key:2222"
    assert world.drive() == "account.other"
    assert world.state.may_be_billing
    assert not world.folder.receipt.exists()
    world.cloud = right
    assert world.drive() is ExitCode.DONE
    assert settled(world)


def test_a_provider_whose_key_is_gone_leaves_it_red(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    late_and_deaf(world)

    def closed(*_: object) -> NoReturn:
        raise SetupError("auth.no_key", "There is no key.", hint="Give one.")

    with monkeypatch.context() as patch:
        patch.setattr(Context, "provider_named", closed)
        assert world.drive() == "destroy.cannot_ask"
    assert world.state.may_be_billing
    assert world.drive() is ExitCode.DONE
    assert settled(world)


def test_one_that_will_not_go_keeps_no_other_alive(world: World) -> None:
    """Two late machines appear, each with its own token.

    The first ignores its destroy; the second must still be ended.
    """
    world.cloud.script["create"] = [Fault.LATE, Fault.LATE]
    world.cloud.profile = replace(world.cloud.profile, late_s=185.0)
    world.far.train_s = 10.0
    with_cap_for(world, 3)
    destroy = world.cloud.destroy
    world.cloud.destroy = lambda name: None if name == world.cloud.boxes[0].id else destroy(name)  # type: ignore[method-assign]
    assert world.drive() == "destroy.not_gone"
    assert [box.id for box in world.cloud.alive] == [world.cloud.boxes[0].id]
    world.cloud.destroy = destroy  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert settled(world)


def test_a_machine_in_only_part_of_a_list_still_came_late(world: World) -> None:
    find = world.cloud.find

    def in_part(token: str | None) -> list[Instance]:
        if world.all_of(Event.DEATH_PROVEN) and "create.late" not in codes(world):
            raise Unknown("the next page cannot be had", found=tuple(find(token)))
        return find(token)

    world.cloud.find = in_part  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert settled(world)


# A run that an earlier gpurun closed while its late machine lived


@pytest.fixture
def closed_red(world: World) -> World:
    """Return a run that an older gpurun closed with exit code 9: its record of the late machine has no token."""
    late_and_deaf(world)
    journal = Journal.open(world.folder.journal, world.clock)
    written = write_receipt(world.home, world.folder)
    journal.write(Event.RECEIPT_OBSERVED, {"seq": written.seq, "sha256": written.sha256})
    journal.write(Event.RUN_CLOSED, {"exit_code": 9})
    records = [json.loads(line) for line in world.folder.journal.read_bytes().splitlines()]
    for record in records:
        if record["data"].get("code") == "create.late":
            record["data"].pop("token", None)
    chain_anew(world.folder.journal, records)
    return world


def test_it_is_red_in_the_list_and_in_the_audit(closed_red: World) -> None:
    listed = ps(Session(home=closed_red.home, clock=closed_red.clock), all_runs=False)
    assert listed.exit_code is ExitCode.MAY_BE_BILLING
    assert [run["run"] for run in listed.data["runs"]] == ["fox-41"]
    assert "MAY BE BILLING" in listed.text
    row = audit(closed_red.home).rows[0]
    assert row.may_be_billing
    assert f" ≥{format_usd(row.measured_micros or usd(0))} " in listed.text
    figures = [(run["spent_micros"], run["spent_is_floor"]) for run in listed.data["runs"]]
    assert figures == [(row.measured_micros, True)]


def test_every_later_command_tries_again(
    closed_red: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr(supervisor, "start_supervisor", lambda folder, *_: started.append(folder.name))
    note_unfinished(Session(home=closed_red.home, clock=closed_red.clock))
    assert started == ["fox-41"]
    assert lacking(capsys.readouterr().err, "fox-41", "instance") == []


def test_destroy_ends_it_and_then_it_is_red_no_more(closed_red: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "start_supervisor", lambda *_: closed_red.drive())
    session = Session(home=closed_red.home, clock=closed_red.clock)
    result = stop_run(session, find_meant_run(session, "fox-41"), "destroy", "destroyed by the user")
    assert closed_red.cloud.alive == []
    assert result.exit_code is ExitCode.DONE
    assert closed_red.state.exit_code == 0
    assert ps(session, all_runs=False).exit_code is ExitCode.DONE
    assert not audit(closed_red.home).rows[0].may_be_billing


def test_a_failed_list_does_not_clear_a_late_machines_state(closed_red: World) -> None:
    closed_red.cloud.broken["find"] = Unknown("503")
    assert closed_red.drive() == "destroy.not_gone"
    assert closed_red.state.may_be_billing
    del closed_red.cloud.broken["find"]
    assert closed_red.drive() is ExitCode.DONE
    assert not closed_red.state.may_be_billing
