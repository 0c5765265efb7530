"""Tests that a rental loses nothing when answers are lost, connections are cut and processes are killed.

Commands, sshd and training (on the CPU) are real. Only the clouds are emulated; the tests inject the faults there.
"""

from __future__ import annotations

import json
import re
import stat
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.journal_records import Event, Record
from gpurun.core.money import usd
from gpurun.ledger.journal import read_journal
from gpurun.remote.key_pairs import make_keys
from tests.clouds.rented import CLOUDS, Cloud, User, kill_supervisors, runpod, somebody
from tests.emulators import aws, guests, lambda_cloud, sshd
from tests.emulators.guests import Faults, Guest, Meter
from tests.emulators.runpod import Fault
from tests.later import LATER

CUT_S, FROZEN_S = 2.0, 10.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(guests.whole()), reason=guests.whole() or "guests have disks of their own"),
]
Done = CompletedProcess[str]


@contextmanager
def training(user: User, *words: str) -> Iterator[Future[Done]]:
    """Run `gpurun train` in a thread; yield the future of its result."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(user.trains, *words, timeout_s=600.0)


def list_event_data(user: User, event: Event) -> list[dict[str, Any]]:
    """Return the data of the journal's records of an event, in order."""
    return [record.data for record in records(user) if record.event is event]


def wall(user: User, event: Event) -> float:
    """Return the wall time of the first record of an event."""
    return next(record.wall for record in records(user) if record.event is event)


def records(user: User) -> tuple[Record, ...]:
    journal = user.home / "runs/fox-41/journal.jsonl"
    return read_journal(journal).records if journal.exists() else ()


def words_of(pid: int) -> list[bytes]:
    """Return a process's command line and environment; an empty list if it has just ended."""
    try:
        return [(Path(f"/proc/{pid}") / name).read_bytes() for name in ("cmdline", "environ")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait_for(user: User, event: Event) -> None:
    """Wait until the journal has a record of the event; fail after two minutes."""
    for _ in ticks(SystemClock(), 0.01, 120):
        if list_event_data(user, event):
            return
    raise AssertionError(f"no {event}:\n{user.said()}")


def cut(guest: Guest) -> None:
    """Cut every connection of a machine in mid-transfer, and let it refuse new ones for CUT_S seconds."""
    guest.freeze()
    guest.deaf()
    guest.thaw()
    time.sleep(CUT_S)
    guest.hear()


def came_home_whole(user: User) -> bool:
    """Assert that each step is logged once, in order, the last checkpoint is at home and the audit agrees."""
    folder = user.home / "runs/fox-41"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert steps == sorted(set(steps))
    assert events[-1]["kind"] == "stop"
    assert events[-1]["reason"] == "done"
    assert (folder / "artifacts/checkpoints/000060.model.safetensors").stat().st_size > 0
    assert list_event_data(user, Event.COLLECT_OBSERVED)[-1]["missing"] == []
    code, audit = user.envelope("audit")
    assert (code, audit["ok"]) == (0, True), json.dumps(audit)
    return True


def paid(user: User) -> bool:
    """Assert that no machine lives, and that the receipt's cost is not below the meter's; return True."""
    assert user.cloud.alive() == []
    statement = user.envelope("receipt", "fox-41")[1]["data"]["statement"]["predicate"]
    assert statement["teardown"]["is"] == "destroyed"
    assert user.cloud.meter.total_micros() <= statement["cost"]["upper_bound_micros"]
    return True


def test_lost_answers_cuts_late_sshd_and_a_freeze_lose_nothing(tmp_path: Path) -> None:
    with runpod(tmp_path / "cloud", Faults(sshd_delay_s=4.0, zstd_missing=True)) as cloud:
        cloud.emulator.fail("create", Fault.ERROR_AFTER)
        cloud.emulator.fail("list", Fault.TOO_MANY, Fault.TOO_MANY)
        cloud.emulator.fail("read", Fault.TOO_MANY, None, Fault.TOO_MANY)
        with somebody(cloud, tmp_path / "home") as user, training(user) as rental:
            wait_for(user, Event.SHIP_INTENDED)
            (guest,) = cloud.guests
            cut(guest)
            wait_for(user, Event.TRAIN_STARTED)
            guest.freeze()
            time.sleep(FROZEN_S)
            guest.thaw()
            wait_for(user, Event.COLLECT_INTENDED)
            cut(guest)
            done = rental.result()
            assert done.returncode == 0, done.stderr + user.said()
            assert len(cloud.emulator.world.pods) == 1
            assert list_event_data(user, Event.CREATE_OBSERVED)[0]["adopted"] is True
            (ready,) = list_event_data(user, Event.READY_OBSERVED)
            assert wall(user, Event.READY_OBSERVED) - wall(user, Event.CREATE_INTENDED) >= 4.0
            assert ready["facts"]["codecs"] == ["gzip"]
            assert guest.log.count("Accepted publickey") >= 3, "each cut was followed by another login"
            assert came_home_whole(user)
            assert paid(user)


FORMS = [lambda_cloud.KEY.encode(), b64encode(lambda_cloud.KEY.encode())]
"""The guard's key in plain form, and encoded as in the launch request."""


def kept_by(home: Path) -> list[str]:
    """Return the files of a home that contain the guard's key."""
    files = [path for path in home.rglob("*") if path.is_file()]
    return [str(path) for path in files if any(form in path.read_bytes() for form in FORMS)]


def test_a_key_on_the_machine_is_in_no_argument_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "install.sh").write_text("ls agent >set-up 2>&1\ntrue\n")
    with CLOUDS["lambda"](tmp_path / "cloud") as cloud:
        cloud.emulator.fail("launch", lambda_cloud.Fault.DROP_RESPONSE)
        words = ("--setup", str(tmp_path / "install.sh"))
        with somebody(cloud, tmp_path / "home") as user, training(user, *words) as rental:
            wait_for(user, Event.TRAIN_STARTED)
            (guest,) = cloud.guests
            (folder,) = (guest.root / "home/ubuntu/.gpurun").iterdir()
            assert FORMS[1] in cloud.emulator.bodies("launch")[0]["user_data"].encode()
            seen = [words for pid in guest.pids for words in words_of(pid)]
            assert seen
            assert not any(form in words for words in seen for form in FORMS)
            assert stat.S_IMODE((guest.root / "var/lib/cloud/bootcmd").stat().st_mode) & 0o077 == 0
            assert "python.json" not in (folder / "set-up").read_text(), "it ran before the machine was judged"
            done = rental.result()
            assert done.returncode == 0, done.stderr + user.said()
            order = [event for event in user.events() if event in (Event.READY_OBSERVED, Event.SHIP_INTENDED)]
            assert order == [Event.READY_OBSERVED, Event.SHIP_INTENDED]
            deadline = float(cloud.emulator.bodies("launch")[0]["tags"][2]["value"])
            assert list_event_data(user, Event.READY_OBSERVED)[0]["armed"] == deadline
            assert len(cloud.emulator.world.instances) == 1
            assert came_home_whole(user)
            assert paid(user)
            assert kept_by(user.home) == []
            assert not any(form in (done.stdout + done.stderr).encode() for form in FORMS)


def test_a_machine_whose_client_dies_at_launch_ends_in_the_cap(
    tmp_path: Path,
) -> None:
    """No process ever connects to the machine; the test only moves the deadline from its launch to an earlier time."""
    with CLOUDS["lambda"](tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        begun = user.begins()
        assert any(cloud.emulator.count("launch") for _ in ticks(SystemClock(), 0.02, 120)), user.said()
        kill_supervisors(user.home)
        assert begun.wait(60) == 9
        assert not list_event_data(user, Event.READY_OBSERVED)
        assert "not armed" in user.types("ps").stdout
        assert any(cloud.guests for _ in ticks(SystemClock(), 0.1, 60))
        timer = cloud.guests[0].root / "var/lib/gpurun"
        assert any((timer / "spent").exists() for _ in ticks(SystemClock(), 0.1, 60))
        (intent,) = list_event_data(user, Event.CREATE_INTENDED)
        deadline = int((timer / "spent").read_text().split()[3])
        assert abs(deadline - intent["deadline_wall"]) < 5
        assert intent["worst_micros"] <= usd(5), "which pays for all of the lease, that deadline and the kill"
        (timer / "deadline").write_text("1")
        assert any(not cloud.alive() for _ in ticks(SystemClock(), 0.1, 60)), user.said()
        assert cloud.meter.running == []
        assert cloud.meter.total_micros() <= intent["worst_micros"]
        assert kept_by(user.home) == []


def test_a_lost_answer_and_a_killed_supervisor_make_one_machine(tmp_path: Path) -> None:
    with CLOUDS["aws"](tmp_path / "cloud") as cloud:
        cloud.emulator.fail("RunInstances", aws.Fault.DROP_ANSWER)
        with somebody(cloud, tmp_path / "home") as user:
            assert user.trains("--detach").returncode == 0
            wait_for(user, Event.TRAIN_STARTED)
            kill_supervisors(user.home)
            resumed = user.types("resume", "fox-41")
            assert resumed.returncode == 0, resumed.stderr + user.said()
            assert len(cloud.emulator.world.instances) == 1
            assert len(list_event_data(user, Event.CREATE_INTENDED)) == 1
            assert came_home_whole(user)
            assert paid(user)


def test_a_box_of_ones_own_is_trained_on_and_left_as_it_was(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "identity")
    with Guest.boot(user="ubuntu", folder=tmp_path / "box", authorized_keys=[keys.client_public]) as box:
        box.wait_ready()
        asks = ("--host", f"{box.user}@{box.host}:{box.port}", "--identity", str(tmp_path / "identity/client"),
                "--price-per-hour", "1", "--accept-cpu")  # fmt: skip
        cloud = Cloud("ssh", {}, Meter(time.time), list, asks)
        before = set(box.pids)
        with somebody(cloud, tmp_path / "home") as user:
            done = user.trains()
            assert done.returncode == 0, done.stderr + user.said()
            assert came_home_whole(user)
            receipt = user.envelope("receipt", "fox-41")[1]["data"]["statement"]["predicate"]
            assert receipt["teardown"]["is"] == "user_operated"
        assert box.alive
        assert list((box.root / "home/ubuntu").glob(".gpurun/*")) == []
        for _ in ticks(SystemClock(), 0.05, 10):
            if set(box.pids) <= before:
                return
        raise AssertionError(f"left there: {set(box.pids) - before}")


def test_a_box_behind_a_bastion_trains_with_an_agents_key_alone(tmp_path: Path) -> None:
    keys, other = make_keys(tmp_path / "identity"), make_keys(tmp_path / "bastion")
    bastion = sshd.Sshd(
        tmp_path / "sshd", host_keys=[tmp_path / "bastion" / "host"], authorized_keys=[keys.client_public]
    )
    jump = f"{bastion.user}@127.0.0.1:{bastion.port}"
    with (
        Guest.boot(user="ubuntu", folder=tmp_path / "box", authorized_keys=[keys.client_public]) as box,
        sshd.key_agent(tmp_path, tmp_path / "bastion" / "client", tmp_path / "identity" / "client") as agent,
    ):
        (tmp_path / "identity" / "client").unlink()
        box.wait_ready()
        asks = ("--host", f"{box.user}@{box.host}:{box.port}", "--identity", "agent", "--jump", jump, "--accept-cpu")
        cloud = Cloud("ssh", {"SSH_AUTH_SOCK": str(agent)}, Meter(time.time), list, asks)
        with somebody(cloud, tmp_path / "home") as user:
            done = user.trains()
            assert done.returncode == 0, done.stderr + user.said()
            assert came_home_whole(user)
            code, envelope = user.envelope("confirm-shutdown", "fox-41")
            assert (code, f"only by {jump}" in envelope["errors"][0]["message"]) == (10, True), envelope
            settled = json.loads((tmp_path / "home/runs/fox-41/plan.json").read_text())["box"]
            assert settled["jump_host_key"] == other.host_public.removesuffix(" gpurun")
        assert list((box.root / "home/ubuntu").glob(".gpurun/*")) == []
    bastion.close()


@LATER
def test_a_key_revoked_in_mid_run_is_exit_9_until_it_is_back(tmp_path: Path) -> None:
    """The error must name all that a user needs to end the machine by hand, in case its own timer fails too."""
    with runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        routes = ("create", "list", "read", "delete", "action")
        with training(user) as rental:
            wait_for(user, Event.TRAIN_STARTED)
            for route in routes:
                cloud.emulator.fail(route, *[Fault.REVOKED] * 10_000)
            red = rental.result()
        assert red.returncode == 9, red.stderr + user.said()
        (error,) = json.loads(red.stdout.splitlines()[-1])["errors"]
        words = f"{error['message']} {error['hint']}"
        records = read_journal(user.home / "runs" / "fox-41" / "journal.jsonl").records
        assert next(str(record.data["id"]) for record in records if record.event is Event.DESTROY_INTENDED) in words
        assert not re.search(r"[.,;:][.;]", words)
        assert "https://" in words
        assert "gpurun destroy fox-41" in words
        cloud.emulator.faults.clear()
        assert user.types("resume", "fox-41").returncode == 0
        assert came_home_whole(user)
        assert paid(user)
