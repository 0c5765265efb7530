"""Tests of a machine that its provider refuses to end: it ends itself, and the user learns when and at what cost."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.cli.commands.ps import ps
from gpurun.cli.session import Session
from gpurun.cli.viewer import result_without_supervisor
from gpurun.core.errors import SetupError
from gpurun.core.journal_records import Event
from gpurun.core.money import cost_of, total, usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger.runs import gave_up, look_at_run
from gpurun.lifecycle.job_spec import ends_unwatched, job_of
from gpurun.lifecycle.steps.destroy_machine import ANSWER_S
from gpurun.remote.interface import MachineLost
from tests.emulators.fake import Fault
from tests.lifecycle.scripted_cloud import LEASE, RATE, ScriptedCloud, World
from tests.refusals import lacking

DEAD_KEY = SetupError("auth.refused", "RunPod refuses the key.", hint="Give another: gpurun auth set runpod.")


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return a world whose machine arms a timer when it boots; the timer ends the machine."""
    world = World(Home(tmp_path))
    world.cloud.profile = replace(world.cloud.profile, timer="boot")
    return world


def deaf(cloud: ScriptedCloud) -> None:
    """Make `destroy`, `find`, `read` and `leftovers` refuse the key from now on."""
    cloud.broken = dict.fromkeys(("destroy", "find", "read", "leftovers"), DEAD_KEY)


def died_s(world: World) -> float:
    assert world.cloud.alive == []
    return world.cloud.boxes[0].died_s or 0.0


def incidents(world: World) -> list[str]:
    return [incident["code"] for incident in world.all_of(Event.INCIDENT)]


def test_with_a_dead_key_the_machine_ends_once_files_are_home(world: World) -> None:
    world.far.during = lambda: deaf(world.cloud)
    assert world.drive() == "destroy.not_gone"
    trained_s = next(record.mono for record in world.records if record.event is Event.COLLECT_OBSERVED)
    assert died_s(world) - trained_s < ANSWER_S + 5
    assert len(world.at_home) == 3
    message = str(world.records[-1].data["message"])
    assert lacking(message, "SSH", "$0.", "gpurun auth set runpod") == []
    assert world.state.may_be_billing, "it is not proven"
    world.cloud.broken.clear()
    assert world.drive() == 0
    assert not world.state.may_be_billing


def test_what_it_is_said_to_cost_at_most_has_the_price_that_rose(world: World) -> None:
    """The highest cost in the text must use the risen price.

    With the plan's price it was $7.00, but $7.08 was billed.
    """
    world.cloud.reported_rate = lambda verb: usd(4) if world.clock.monotonic() >= 20 else RATE
    world.far.during = lambda: deaf(world.cloud) if incidents(world) else None
    assert world.drive() == "destroy.not_gone"
    assert incidents(world)[0] == "price.rose"
    (end,) = [incident for incident in world.all_of(Event.INCIDENT) if incident["code"] == "machine.ends_itself"]
    most = usd(end["message"].partition("at most $")[2].split()[0])
    intent = next(record for record in world.records if record.event is Event.CREATE_INTENDED)
    lasts_s = end["ends_wall"] + LEASE.kill_allowance_s - intent.wall
    assert total(cost_of(RATE, 20), cost_of(usd(4), lasts_s - 20)) <= most


def test_a_user_can_end_a_machine_without_its_provider(world: World) -> None:
    def stops() -> None:
        deaf(world.cloud)
        ask_to_stop(world.folder, "destroy", by="user", reason="a test")

    world.far.during = stops
    assert world.drive() == "destroy.not_gone"
    asked_s = next(record.mono for record in world.records if record.event is Event.STOP_REQUESTED)
    assert died_s(world) - asked_s < ANSWER_S + 5
    assert world.clock.monotonic() - asked_s < 120, "five minutes of asking with a dead key say no more than one"


def test_a_machine_that_cannot_be_reached_either_is_reported_so(world: World) -> None:
    def cut_off() -> None:
        deaf(world.cloud)
        world.far.broken["end"] = MachineLost("no route to host")
        ask_to_stop(world.folder, "destroy", by="user", reason="a test")

    world.far.during = cut_off
    assert world.drive() == "destroy.not_gone"
    assert incidents(world) == ["destroy.not_gone"]
    assert world.cloud.alive


def test_where_no_timer_is_on_the_machine_it_is_not_told(tmp_path: Path) -> None:
    world = World(Home(tmp_path))
    world.far.during = lambda: deaf(world.cloud)
    assert world.drive() == "destroy.not_gone"
    assert "machine.ends_itself" not in incidents(world)


def test_train_ps_and_audit_say_the_same_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.far.during = lambda: deaf(world.cloud)
    assert world.drive() == "destroy.not_gone"
    session = Session(home=world.home)
    seen = look_at_run(world.home, "fox-41")
    train, listed = result_without_supervisor(seen, session.clock.wall()), ps(session, all_runs=False)
    monkeypatch.setattr("sys.argv", ["gpurun", "audit", "--json", "--home", str(world.home.root)])
    assert run_app(build_app()) == 9
    audited = json.loads(capsys.readouterr().out)["errors"][0]["message"]
    assert train.errors[0].what == audited
    assert audited in listed.after
    assert "own timer" in audited
    assert (train.exit_code, listed.exit_code) == (9, 9)


def test_a_coming_self_end_is_a_plan_that_names_who_grants_it(world: World) -> None:
    """The text names the provider to ask, and a cost.

    Once the machine should have ended, it adds that no end was seen.
    """
    world.far.during = lambda: deaf(world.cloud)
    assert world.drive() == "destroy.not_gone"
    (ends_wall,) = [data["ends_wall"] for data in world.all_of(Event.INCIDENT) if data["code"] == "machine.ends_itself"]
    seen = look_at_run(world.home, "fox-41")
    before, after = gave_up(seen, ends_wall - 1), gave_up(seen, ends_wall)
    assert lacking(before, f"ask {world.cloud.name} ", "$") == []
    assert after.startswith(before)
    assert after != before


def test_a_machines_own_timer_bounds_no_cost(world: World) -> None:
    """The receipt must not take the timer's time as the machine's end.

    A provider once refused the timer's request for minutes: $48.43 was billed, but the receipt stated $39.75.
    """
    lost_in_training(world)
    assert world.drive() == 7
    predicate = json.loads(b64decode(json.loads(world.folder.receipt.read_bytes())["payload"]))["predicate"]
    assert predicate["cost"]["rentals"][0]["end_is"] == "unseen"
    assert world.all_of(Event.DESTROY_INTENDED)[0]["timer"] is False


@pytest.mark.parametrize("since", [True, False])
def test_a_timer_that_uses_the_refused_key_is_not_promised(world: World, since: bool) -> None:
    """If the timer uses the key that was refused, no cost bound is promised.

    On Lambda the timer keeps the key of the launch, even if a newer key is stored later.
    """
    world.cloud.guard_shares_key = True

    def refused() -> None:
        deaf(world.cloud)
        world.cloud.guard_shares_key = since

    world.far.during = refused
    assert world.drive() == "destroy.not_gone"
    message = str(world.records[-1].data["message"])
    assert "timer" in message
    assert "at most $" not in message


def test_a_timer_is_armed_and_shown_only_once_it_is_read_back(world: World) -> None:
    session = Session(home=world.home)

    def said() -> str:
        return ps(session, all_runs=False).text

    world.cloud.killing = "before far.end"
    assert world.drive() == "killed"
    assert "not armed" in said()
    world.cloud.killing = "before far.unpack"
    assert world.drive() == "killed"
    assert "not armed" not in said()
    (ready,) = world.all_of(Event.READY_OBSERVED)
    assert ready["armed"] == int(world.cloud.boxes[0].ends_s + world.cloud._epoch)
    assert world.drive() == 0


def test_a_machine_without_its_timer_is_ended_before_sending(world: World) -> None:
    world.cloud.creates = [Fault.NO_TIMER]
    assert world.drive() == 5
    assert world.cloud.alive == []
    assert not world.all_of(Event.SHIP_INTENDED)
    (failed,) = world.all_of(Event.STEP_FAILED)
    assert failed["code"] == "timer.not_armed"


def test_an_accepted_weak_lease_trains_and_claims_no_timer(world: World) -> None:
    world.cloud.creates = [Fault.NO_TIMER]
    plan = world.plan.model_copy(update={"choices": Choices(weak_lease=True)})
    world.folder.plan.write_text(plan.to_json())
    assert world.drive() == 0
    assert world.all_of(Event.READY_OBSERVED)[0]["armed"] is None
    assert world.all_of(Event.DESTROY_INTENDED)[0]["timer"] is False


def lost_in_training(world: World) -> None:
    """Kill the supervisor during training, and let the time pass until the lease is over."""
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    world.clock.sleep(LEASE.total_s + 600)


def test_the_receipt_says_that_files_were_kept_to_the_deadline(world: World) -> None:
    lost_in_training(world)
    assert world.drive() == 7
    assert "machine.unwatched" in incidents(world)
    receipt = json.loads(world.folder.receipt.read_bytes())
    all_incidents = json.loads(b64decode(receipt["payload"]))["predicate"]["incidents"]
    (said,) = [incident["message"] for incident in all_incidents if incident["code"] == "machine.unwatched"]
    assert "its deadline" in said


def test_a_pushing_machine_knows_how_long_to_await_a_lost_client(world: World) -> None:
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    job = job_of(world.state, world.context)
    assert not {"linger_s", "guard_folder"} & job.keys(), "without a bucket it has the only copy"
    pushes = world.state.model_copy(update={"pushed": "runs/fox-41/gr-1"})
    job = job_of(pushes, world.context)
    assert (job["linger_s"], job["guard_folder"]) == (LEASE.collect_s + 900, "/var/lib/gpurun")
    unarmed = job_of(pushes.model_copy(update={"armed": False}), world.context)
    assert "linger_s" not in unarmed
    assert "16 minutes" in ends_unwatched(pushes.model_copy(update={"linger_s": job["linger_s"]}))
