"""Tests that kill the supervisor at every journal record and outward call, drive the run again and check the promises.

The supervisor is a separate process and dies by a real SIGKILL. Instance, agent and trainer are real processes too, and
survive it. How often a run looks at its machine depends on the computer's speed, so only the first look between two
records is a crash point.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home, RunFolder
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import read_journal
from gpurun.ledger.signing import payload_of
from gpurun.providers.local import LocalProvider
from gpurun.providers.processes import processes_of
from tests.lifecycle.tiny_runs import drive, make_run, trainer_events

GROUPS = 8
STEPS = 30
LOOKS = {"local.read", "far.poll"}
RECORDS = {str(event) for event in Event}


def crash_points_of_a_run(home: Home) -> list[str]:
    """Return the crash points of a complete run, in order, each as the names from the last record to the point."""
    make_run(home, "whole-1", steps=STEPS)
    log = home.root / "points.txt"
    assert drive(home, "whole-1", GPURUN_CRASH_LOG=str(log)).returncode == 0
    paths: list[str] = []
    record, since = "", Counter[str]()
    for name in [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]:
        since[name] += 1
        if since[name] == 1 or name.split()[1] not in LOOKS:
            paths.append(" > ".join([*([record] if record else []), *[name] * since[name]]))
        if name.removeprefix("after ") in RECORDS:
            record, since = name, Counter()
    return paths


def check_promises(home: Home, folder: RunFolder) -> None:
    """Assert the promises P1 to P5 and P9 from the disk and the process table, not from what gpurun reports."""
    records = read_journal(folder.journal).records
    events = [record.event for record in records]
    tokens = {record.data["token"] for record in records if record.event is Event.CREATE_INTENDED}
    assert events.index(Event.CREATE_INTENDED) < events.index(Event.CREATE_OBSERVED), "P1: intent first"
    assert all(processes_of(token) == [] for token in tokens), "P2, P3: no process of any token is left"
    assert LocalProvider(home, SystemClock()).find(None) == [], "P3: no instance is left"
    assert events.count(Event.DEATH_PROVEN) == 1, "P4: death is proven, once"
    assert events[-1] is Event.RUN_CLOSED
    shown = folder.journal.read_bytes() + payload_of(json.loads(folder.receipt.read_bytes()))
    places = [str(home.instances).encode(), str(home.runs).encode()]
    assert not any(place in shown for place in places), "a receipt that is shown names no folder of this laptop"
    trained = trainer_events(folder)
    assert [event["kind"] for event in trained].count("start") == 1, "P9: one trainer, never started again"
    steps = [event["step"] for event in trained if event["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1)), "P9: no event lost or doubled"
    collected = next(record.data["files"] for record in reversed(records) if record.event is Event.COLLECT_OBSERVED)
    assert {file["step"] for file in collected} == {STEPS}, "P9: the last checkpoint came home"
    for file in collected:
        content = (folder.artifacts / file["name"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file["sha256"]


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return crash_points_of_a_run(Home(tmp_path_factory.mktemp("whole") / "home"))


def test_every_record_and_every_outward_call_is_a_crash_point(points: list[str]) -> None:
    names = {point.rpartition(" > ")[2] for point in points}
    for name in ("create.intended", "train.started", "death.proven", "run.closed"):
        assert {f"before {name}", f"after {name}"} <= names
    for call in ("local.create", "far.receive", "far.start", "far.poll", "far.get", "local.destroy", "ledger.append"):
        assert f"before {call}" in names


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_killed_anywhere_and_resumed_the_run_ends_the_same(points: list[str], group: int, tmp_path: Path) -> None:
    for number, point in list(enumerate(points))[group::GROUPS]:
        home = Home(tmp_path / f"home-{number}")
        folder = make_run(home, steps=STEPS)
        died = drive(home, GPURUN_CRASH_AT=point)
        assert died.returncode == -9, f"{point} was not reached: {died.stderr}"
        resumed = drive(home)
        assert resumed.returncode == 0, f"after a kill at {point}: {resumed.stderr}"
        check_promises(home, folder)
        assert [row.problems for row in audit(home).rows] == [()], f"after a kill at {point}"


@pytest.mark.slow
def test_killed_at_its_fourteenth_point_each_time_the_run_ends(tmp_path: Path) -> None:
    """Fourteen points are enough for the longest step, the proof of death, so each supervisor makes progress."""
    home = Home(tmp_path / "home")
    folder = make_run(home, steps=STEPS)
    for _ in range(200):
        if drive(home, GPURUN_CRASH_AT="14").returncode == 0:
            break
    check_promises(home, folder)
