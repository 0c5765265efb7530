"""Tests of the fault matrix between ready and the end of collect: full disks, dying machines and hanging agents."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.cli.session import Session
from gpurun.cli.viewer import show_finished
from gpurun.core.errors import CollectFailed, ExitCode, StoreFull
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import InstanceState
from gpurun.core.stop_request import How, ask_to_stop
from gpurun.ledger.run_state import _EFFECTS
from gpurun.ledger.runs import look_at_run
from gpurun.lifecycle.artifacts.inventory import Inventory
from gpurun.lifecycle.artifacts.log_copy import MOST_DRAIN_S
from gpurun.lifecycle.instance.job_signs import read_last_events
from gpurun.lifecycle.steps.watch_training import POLL_S
from gpurun.remote.client import Chunk, Poll
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.machine_facts import MachineFacts
from gpurun.remote.messages import Manifest, Shipped, Started
from gpurun.remote.ssh import HostKeyMismatch
from tests.lifecycle.faults import ended, kept, receipt_of
from tests.lifecycle.scripted_cloud import CALL_S, LEASE, WEIGHTS, Killed, World
from tests.refusals import lacking

HALF = "checkpoints/000020.model.safetensors"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


# ship


def test_a_far_disk_that_is_too_small_is_refused_before_sending(world: World) -> None:
    hello = world.far.hello
    world.far.hello = lambda python=None, **_: hello(python).model_copy(update={"disk_free_bytes": 100})  # type: ignore
    world.far.broken["unpack"] = AssertionError("nothing may be sent")  # type: ignore[assignment]
    assert world.drive() is ExitCode.SETUP
    failure = world.state.failure
    assert failure.code == "box.disk_small"
    assert "disk_gb=" in failure.hint, "it says what to ask for"
    assert kept(world)


@pytest.mark.parametrize("call", ["install_agent", "unpack", "start"])
@pytest.mark.parametrize("reason", ["disk_full", "os_error"])
def test_a_far_disk_that_fills_or_fails_ends_it_in_its_words(world: World, call: str, reason: str) -> None:
    world.far.broken[call] = FarRefusal(reason, "no room for 7,000,000,000 bytes", needed_bytes=7_000_000_000)
    assert world.drive() is ExitCode.SETUP, "it is the machine's trouble, and no bug of gpurun"
    failure = world.state.failure
    assert (failure.code, failure.message) == (f"far.{reason}", "no room for 7,000,000,000 bytes")
    assert "disk" in failure.hint
    assert ("disk_gb=" in failure.hint) is (reason == "disk_full"), "a larger disk does not help a broken one"
    assert not world.all_of(Event.TRAIN_STARTED)
    assert kept(world)


def test_own_shards_moved_away_before_sending_are_named(world: World) -> None:
    own, mine = Path(world.plan.data.folder), world.home.root / "mine"
    (own / "data.json").write_text(json.dumps({"train": [{"name": "train_000001.bin"}], "val": []}))
    data = world.plan.data.model_copy(update={"folder": str(mine), "beside": str(own)})
    world.plan = world.plan.model_copy(update={"data": data})
    world.folder.plan.write_text(world.plan.to_json())
    assert world.drive() is ExitCode.USAGE
    failure = world.state.failure
    assert failure.code == "pack.unreadable"
    assert "mine/train_000001.bin" in failure.message
    assert kept(world)


def test_a_closed_lid_during_sending_costs_its_time_in_the_lease(world: World) -> None:
    unpack = world.far.unpack

    def dozing(*given: object, **named: object) -> object:
        world.clock.sleep(30.0)
        return unpack(*given, **named)  # type: ignore[arg-type]

    world.far.broken, world.far.broken_times = {"unpack": FarRefusal("cut_stream", "cut")}, {"unpack": 1}
    world.far.unpack = dozing  # type: ignore[method-assign,assignment]
    assert isinstance(world.drive(), ExitCode)
    assert (world.cloud.boxes[0].died_s or 0) <= LEASE.total_s
    assert kept(world)


# run


@pytest.mark.parametrize(("shift_s", "torch_s"), [(0, 0), (3600, 0), (-3600, 0), (-110, 0), (0, 100)])
def test_training_time_does_not_depend_on_the_machines_clock(world: World, shift_s: float, torch_s: float) -> None:
    """The machine's clock may be wrong or be corrected, so the job states in seconds after its start when to stop."""
    hello, start, jobs = world.far.hello, world.far.start, []

    def shifted(python: str | None = None, **_: Any) -> MachineFacts:
        facts = hello(python).model_copy(update={"wall": world.clock.wall() + shift_s})
        world.clock.sleep(torch_s)
        return facts

    def started(job: Mapping[str, Any]) -> Started:
        jobs.append((job, world.context.seconds_left(world.state)))
        return start(job)

    world.far.hello, world.far.start = shifted, started  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    job, left_s = jobs[0]
    assert job["hard_stop_s"] == pytest.approx(left_s - LEASE.collect_s, abs=5)
    assert job["soft_stop_s"] == pytest.approx(job["hard_stop_s"] - job["save_s"], abs=5)
    assert job["hard_stop_wall"] - job["soft_stop_wall"] == pytest.approx(job["hard_stop_s"] - job["soft_stop_s"])


def test_a_flood_of_log_costs_neither_lease_nor_checkpoint(world: World) -> None:
    """A log of 200 MB on a slow line must neither keep the machine for long nor cost a checkpoint."""
    poll, size = world.far.poll, 200_000_000

    def flooded(wants: Mapping[str, tuple[int, int]]) -> Poll:
        reply = poll(wants)
        world.clock.sleep(10.0)
        offset, most = wants["trainer.log"]
        return Poll(reply.status, {**reply.chunks, "trainer.log": Chunk(offset, b"x" * min(most, size - offset), size)})

    world.far.poll = flooded  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    assert (world.cloud.boxes[0].died_s or 0) < LEASE.boot_s + 60 + MOST_DRAIN_S + 120
    assert kept(world)


@pytest.mark.parametrize("name", ["events.jsonl", "trainer.log"])
@pytest.mark.parametrize("is_stopped", [False, True], ids=["left alone", "stopped meanwhile"])
def test_a_20_gb_log_holds_no_machine_and_no_stop_restarts_it(world: World, name: str, is_stopped: bool) -> None:
    poll, size, ended_s = world.far.poll, 20 << 30, list[float]()

    def flooded(wants: Mapping[str, tuple[int, int]]) -> Poll:
        reply = poll(wants)
        if reply.status.state != "exited":
            return reply
        ended_s.append(world.clock.monotonic())
        world.clock.sleep(1.0)
        if is_stopped and len(ended_s) == 8:
            ask_to_stop(world.folder, "save", by="user", reason="enough")
        offset, most = wants[name]
        return Poll(reply.status, {**reply.chunks, name: Chunk(offset, bytes(min(most, size - offset)), size)})

    world.far.poll = flooded  # type: ignore[method-assign]
    # Without the last event gpurun cannot know that training was done.
    assert world.drive() is (ExitCode.DONE if name == "trainer.log" else ExitCode.TRAINING_FAILED)
    assert ended_s[-1] - ended_s[0] <= LEASE.collect_s / 4 + 1
    assert len(world.at_home) == 3
    left = [record.data["message"] for record in world.records if record.data.get("code") == "log.left"]
    assert len(left) == 1
    assert lacking(left[0], name, " bytes") == []


@pytest.mark.parametrize("state", ["idle", "running"])
def test_whatever_an_agent_says_there_is_time_to_collect(world: World, state: str) -> None:
    """The agent never reports the end of training.

    gpurun must stop early enough to download the files within the lease.
    """
    poll = world.far.poll

    def for_ever(wants: Mapping[str, tuple[int, int]]) -> Poll:
        reply = poll(wants)
        return Poll(reply.status.model_copy(update={"state": state, "exit_code": None}), reply.chunks)

    world.far.poll = for_ever  # type: ignore[method-assign]
    assert world.drive() is ExitCode.BUDGET_STOP
    assert len(world.at_home) == 3
    assert kept(world)


@pytest.mark.parametrize("ending_s", [0.7, 3.0, 400.0])
def test_the_end_is_seen_within_a_tenth_of_the_training_time(world: World, ending_s: float) -> None:
    """A save and samples follow the last step. gpurun must see their end soon, or it pays for an idle machine."""
    poll, steps, seen = world.far.poll, world.context.plan.job.resolved["train"]["steps"], list[float]()
    world.far.train_s = 60.0 + ending_s

    def timed(wants: Mapping[str, tuple[int, int]]) -> Poll:
        reply = poll(wants)
        seen.append(world.clock.monotonic() - world.far.started_s)
        line = b'{"kind":"step","step":%d}\n' % (steps if seen[-1] >= 60 else steps // 2)
        line = b'{"kind":"stop","reason":"done"}\n' if reply.status.state == "exited" else line
        return Poll(reply.status, {**reply.chunks, "events.jsonl": Chunk(wants["events.jsonl"][0], line, 0)})

    world.far.poll = timed  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    training, ending = [at for at in seen if at < 60], [at for at in seen if at >= 60]
    assert ending[-1] - world.far.train_s < min(POLL_S, max(0.1, ending_s / 10)) + CALL_S + 0.01
    assert len(ending) < 20 + len(training) * ending_s / 60, "and one that takes its time is not asked more often"


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_lid_opened_with_time_only_to_collect_learns_the_end(world: World, is_reached: bool) -> None:
    """Training ended while the laptop slept.

    If the machine can be reached again, the run is done; otherwise it is stopped.
    """
    poll = world.far.poll

    def dozing(wants: Mapping[str, tuple[int, int]]) -> Poll:
        reply = poll(wants)
        left_s = world.context.seconds_left(world.state)
        if world.far.polls == 5:
            world.clock.sleep(left_s - LEASE.collect_s / 2)
        if world.far.polls == 5 or (world.far.polls == 6 and not is_reached):
            raise MachineLost("the line is dead after the sleep")
        return reply

    world.far.poll = dozing  # type: ignore[method-assign]
    assert world.drive() is (ExitCode.DONE if is_reached else ExitCode.BUDGET_STOP)
    assert world.state.outcome == ("done" if is_reached else "stopped")
    assert len(world.at_home) == 3
    assert kept(world)


def test_one_event_line_with_a_tree_of_millions_takes_no_memory(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_bytes(b"[" + b"{}," * 1_000_000 + b'{}]\n{"kind": "stop", "reason": "done"}\n')
    tracemalloc.start()
    try:
        stop, _ = read_last_events(events)
        assert stop is not None
        assert stop.reason == "done"
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_machine_taken_in_training_is_proven_gone_and_partial(world: World) -> None:
    def taken_away() -> None:
        if world.far.polls == 3:
            world.cloud.boxes[0].died_s = world.cloud.now

    world.far.during = taken_away
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert world.state.outcome == "lost"
    assert len(world.all_of(Event.DEATH_READ)) >= world.cloud.traits.death_reads
    assert receipt_of(world)["training"]["outcome"] == "lost"
    (error,) = show_finished(
        Session(home=world.home, quiet=True, clock=world.clock), look_at_run(world.home, "fox-41")
    ).errors
    assert error.code == "machine.lost"
    assert world.cloud.name in error.what
    assert kept(world)


def test_a_machine_taken_before_training_has_its_providers_words(world: World) -> None:
    def taken_away(*_: object, **__: object) -> Shipped:
        world.cloud.boxes[0].died_s = world.cloud.now
        raise MachineLost("the line was cut")

    world.far.unpack = taken_away  # type: ignore[method-assign,assignment]
    assert world.drive() is ExitCode.TRAINING_FAILED
    failure = world.state.failure
    assert failure.code == "machine.lost"
    assert world.cloud.name in failure.message


def test_a_hanging_agent_is_left_after_a_minute_and_files_come(world: World) -> None:
    poll, frozen_wall = world.far.poll, []

    def hanging(wants: Mapping[str, tuple[int, int]]) -> Poll:
        reply = poll(wants)
        frozen_wall.append(reply.status.wall)
        return Poll(reply.status.model_copy(update={"wall": frozen_wall[0], "state": "running"}), reply.chunks)

    world.far.poll = hanging  # type: ignore[method-assign]
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert world.state.outcome == "lost"
    assert world.clock.monotonic() < LEASE.boot_s + 180, "not only when the lease is over"
    assert len(world.at_home) == 3
    assert kept(world)


def test_a_lid_closed_during_an_answer_ends_no_training(world: World) -> None:
    """The laptop sleeps for 100 s while it reads an answer with an old heartbeat.

    That must not count as a hanging agent.
    """
    poll, beats = world.far.poll, list[float]()

    def dozing(wants: Mapping[str, tuple[int, int]]) -> Poll:
        reply = poll(wants)
        if world.far.polls == 10:
            reply = Poll(reply.status.model_copy(update={"wall": beats[-1]}), reply.chunks)
            world.clock.sleep(100.0)
        beats.append(reply.status.wall)
        return reply

    world.far.train_s = 200.0
    world.far.poll = dozing  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert world.state.outcome == "done"
    assert kept(world)


@pytest.mark.parametrize("between", ["a line that is down", "a lid that is closed"])
def test_two_refusals_around_an_outage_are_not_a_minute_of_them(world: World, between: str) -> None:
    poll, begun_mono = world.far.poll, world.clock.monotonic()

    def troubled(wants: Mapping[str, tuple[int, int]]) -> Poll:
        reply = poll(wants)
        if world.far.polls in (10, 90):
            raise FarRefusal("broken", "The agent ended with 137 on poll: it said nothing")
        if world.far.polls == 11 and between == "a lid that is closed":
            world.far.polls = 89
            world.clock.sleep(80.0)
            raise MachineLost("The connection is dead: not a byte for 60 s.")
        if 10 < world.far.polls < 90:
            world.clock.sleep(0.5)
            raise MachineLost("no route")
        return reply

    world.far.train_s = 250.0
    world.far.poll = troubled  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert world.far.polls > 90
    assert world.clock.monotonic() - begun_mono > 200
    assert world.state.outcome == "done"
    assert kept(world)


@pytest.mark.parametrize(
    "refusal", [("broken", "The agent ended with 137"), ("disk_full", "no room"), ("os_error", "?")]
)
def test_a_stop_that_is_refused_is_said_again(world: World, refusal: tuple[str, str]) -> None:
    world.far.broken, world.far.broken_times = {"stop": FarRefusal(*refusal)}, {"stop": 3}
    world.far.train_s = 250.0

    def during() -> None:
        if world.far.polls == 10:
            ask_to_stop(world.folder, "save", by="user", reason="enough")

    world.far.during = during
    assert world.drive() is ExitCode.DONE
    assert (world.far.stopped, world.state.outcome) == ("user", "stopped")
    assert world.clock.monotonic() < 150, "it has stopped because it was told to"
    assert kept(world)


@pytest.mark.parametrize("how", ["save", "now"])
@pytest.mark.parametrize("unheard", [MachineLost("the lid was closed"), Killed("before the answer was on record")])
def test_a_stop_after_a_lost_start_brings_home_what_was_trained(world: World, unheard: BaseException, how: How) -> None:
    """The trainer runs although its start was not confirmed.

    After a stop, the checkpoints that it saved must be downloaded.
    """
    start = world.far.start

    def answer_lost(job: Mapping[str, Any]) -> Started:
        start(job)
        world.far.start = start  # type: ignore[method-assign]
        world.clock.sleep(100.0)
        ask_to_stop(world.folder, how, by="user", reason="enough")
        raise unheard

    world.far.train_s = 250.0
    world.far.start = answer_lost  # type: ignore[method-assign]
    ended = world.drive()
    assert (world.drive() if ended == "killed" else ended) is ExitCode.DONE
    assert (world.far.stopped, world.state.outcome) == ("user", "stopped")
    assert len(world.at_home) == 3
    assert kept(world)


@pytest.mark.parametrize("reason", ["hang", "preempted"])
def test_a_trainer_ended_by_the_agent_fails_and_comes_home(world: World, reason: str) -> None:
    """If the agent ended the trainer, the receipt must give the agent's reason, not the signal that it used."""
    poll = world.far.poll

    def stuck(wants: Mapping[str, tuple[int, int]]) -> Poll:
        reply = poll(wants)
        ended = {"exit_code": None, "signal": 9, "stop_reason": reason}
        return Poll(reply.status.model_copy(update=ended if reply.status.state == "exited" else {}), reply.chunks)

    world.far.poll = stuck  # type: ignore[method-assign]
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert (world.state.outcome, world.state.reason) == ("failed", reason)
    training = receipt_of(world)["training"]
    assert training["reason"] == reason
    assert "signal 9" not in training["message"]
    assert len(world.at_home) == 3
    assert kept(world)


def test_a_training_stopped_without_our_request_is_not_a_success(world: World) -> None:
    events = world.far._events

    def by_another() -> list[dict[str, Any]]:
        return [{**event, "reason": "signal"} if event["kind"] == "stop" else event for event in events()]

    world.far._events = by_another  # type: ignore[method-assign]
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert (world.state.outcome, world.state.reason) == ("failed", "signal")
    assert "signal" in receipt_of(world)["training"]["message"]
    assert len(world.at_home) == 3
    assert kept(world)


@pytest.mark.parametrize("state", ["PENDING", "STOPPING", "UNKNOWN"])
def test_unreachable_and_in_no_clear_state_is_not_dead(world: World, state: str) -> None:
    """Only STOPPED and GONE end a training: in any other state an unreachable machine may still train."""
    world.far.broken, world.far.broken_times = {"poll": MachineLost("no route")}, {"poll": 5}

    def unclear() -> None:
        if world.far.polls <= 5:
            world.cloud.reads = [InstanceState(state)]

    world.far.during = unclear
    assert world.drive() is ExitCode.DONE
    assert world.state.outcome == "done"
    assert kept(world)


@pytest.mark.parametrize(
    ("end", "figure"),
    [
        ({"exit_code": 3}, "exit code 3"),
        ({"exit_code": None, "signal": 9}, "signal 9"),
        ({"exit_code": None}, "not known"),
    ],
)
def test_a_trainer_that_ended_silently_is_reported_as_seen(
    world: World, end: dict[str, int | None], figure: str
) -> None:
    poll = world.far.poll

    def silent(wants: Mapping[str, tuple[int, int]]) -> Poll:
        reply = poll(wants)
        return Poll(reply.status.model_copy(update=end if reply.status.state == "exited" else {}), reply.chunks)

    world.far.poll, world.far._events = silent, list  # type: ignore[method-assign]
    assert world.drive() is ExitCode.TRAINING_FAILED
    training = receipt_of(world)["training"]
    assert (training["outcome"], training["exit_code"]) == ("failed", end["exit_code"])
    assert figure in training["message"]


@pytest.mark.parametrize("call", ["unpack", "start", "poll", "manifest"])
def test_a_wrong_host_key_after_first_contact_does_not_end_a_run(world: World, call: str) -> None:
    """A firewall, or a machine of another network with this address, may answer SSH for a while.

    The run must survive that.
    """
    elsewhere = HostKeyMismatch("203.0.113.9:22", "SHA256:ours", "SHA256:theirs")
    world.far.broken, world.far.broken_times = {call: elsewhere}, {call: 20}
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    codes = [incident["code"] for incident in world.all_of(Event.INCIDENT)]
    assert codes == (["ssh.host_key_mismatch"] if call == "poll" else [])
    assert kept(world)


# collect


def test_collecting_waits_for_a_full_laptop_disk_losing_nothing(world: World) -> None:
    full = StoreFull("collect.disk_full", "There is no room.", hint="Free some space.")
    world.far.broken, world.far.broken_times = {f"get {HALF}": full}, {f"get {HALF}": 4}
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    assert {incident["code"] for incident in world.all_of(Event.INCIDENT)} == {"collect.disk_full"}
    assert kept(world)


def test_a_disk_that_stays_full_keeps_no_machine_past_its_lease(world: World) -> None:
    world.far.broken[f"get {HALF}"] = StoreFull("collect.disk_full", "There is no room.", hint="Free some space.")
    assert isinstance(world.drive(), ExitCode)
    assert (world.cloud.boxes[0].died_s or 0) <= LEASE.total_s
    assert world.at_home == {Path(name).name for name, _, _ in WEIGHTS} - {Path(HALF).name}, "what was good is kept"
    assert ended(world)


@pytest.mark.parametrize(
    "ending",
    [
        StoreFull("collect.disk_full", "There is no room.", hint="Free some space."),
        FarRefusal("no_such_file", "it is gone"),
        ValueError("a bug"),
    ],
)
def test_whatever_breaks_a_collect_off_no_connection_stays_open(world: World, ending: Exception) -> None:
    opened: list[SimpleNamespace] = []

    def broken_off(*_: object, **__: object) -> Path:
        lane = SimpleNamespace(closed=0)
        lane.close = lambda: setattr(lane, "closed", lane.closed + 1)
        opened.append(lane)
        world.far._lanes = (*world.far._lanes, lane)
        raise ending

    world.far.fetch = broken_off  # type: ignore[method-assign,assignment]
    assert isinstance(world.drive(), ExitCode)
    assert opened
    assert {lane.closed for lane in opened} == {1}


def test_a_vanished_machines_early_files_count_the_rest_is_named(world: World) -> None:
    manifests: list[Manifest] = []

    def vanish() -> None:
        if world.far.polls == 3:
            manifests.append(world.far.manifest(1 << 40))
            manifest, first = manifests[0], manifests[0].files[0]
            Inventory(world.folder).remember(manifest)  # As the download during training does.
            path = world.folder.artifacts / first.name
            path.parent.mkdir(parents=True)
            path.write_bytes(WEIGHTS[0][1])
            world.cloud.boxes[0].died_s = world.cloud.now

    world.far.during = vanish
    assert world.drive() is ExitCode.TRAINING_FAILED
    (collected,) = world.all_of(Event.COLLECT_OBSERVED)
    names = [file.name for file in manifests[0].files]
    assert [file["name"] for file in collected["files"]] == names[:1]
    assert collected["missing"] == names[1:]
    assert receipt_of(world)["checkpoint"]["files"][0]["name"] == names[0]
    assert kept(world)


def test_a_never_matching_file_is_missing_and_the_rest_is_home(world: World) -> None:
    fetch = world.far.fetch

    def damaged(name: str, size_bytes: int, sha256: str, into: Path, **more: object) -> Path:
        if name == HALF:
            raise CollectFailed(
                "collect.wrong_digest", f"{name} was downloaded 4 times, always with another digest.", hint="Damaged."
            )
        return fetch(name, size_bytes, sha256, into, **more)  # type: ignore[arg-type]

    world.far.fetch = damaged  # type: ignore[method-assign,assignment]
    assert world.drive() is ExitCode.COLLECT_FAILED
    (collected,) = world.all_of(Event.COLLECT_OBSERVED)
    assert collected["missing"] == [HALF]
    assert {file["name"] for file in collected["files"]}.isdisjoint({HALF})
    assert kept(world)


def test_the_bucket_is_asked_beside_a_lost_machines_old_list(world: World) -> None:
    """If the last list of a lost machine is an old one, the bucket must be read too: it may have newer checkpoints."""
    assert world.drive() is ExitCode.DONE
    (record,) = [record for record in world.records if record.event is Event.COLLECT_OBSERVED]
    pushed = world.state.model_copy(update={"pushed": "runs/fox-41"})
    old = record.typed.model_copy(update={"remembered": True})
    assert "pushed" not in _EFFECTS[Event.COLLECT_OBSERVED](pushed, record, old)
    assert _EFFECTS[Event.COLLECT_OBSERVED](pushed, record, record.typed)["pushed"] == ""
