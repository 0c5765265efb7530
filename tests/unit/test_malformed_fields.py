"""Tests that a malformed field in a journal damages only its own run: `audit` and `ps --all` report all others."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from gpurun.ledger.runs import look_at_all, look_at_run, planned_runs
from gpurun.readers.run_status import run_data, run_row
from tests.unit.ledger_samples import CloudRun, Note, chain_anew, finished_run

Records = list[dict[str, Any]]
LEFT_OUT = object()
ODD = ("x", "5", "\ud800", None, 1e300, {}, [], LEFT_OUT)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


class RunWithCostFields(CloudRun):
    """A run whose journal also has the optional fields for cost that these tests corrupt."""

    def death(self, **how: Any) -> Iterator[tuple[float, Note]]:
        wall = self.clock.wall()
        more = {Event.DEATH_READ: {"ended_wall": wall, "ran_s": None, "alive_s_ago": 1.0, "gone_s_ago": 1.0}}
        more[Event.DESTROY_INTENDED] = {"timer": True}
        for seconds, (event, data) in super().death(**how):
            yield seconds, (event, {**data, **more.get(event, {})})

    def through_training(self) -> Iterator[tuple[float, Note]]:
        yield from super().through_training()
        about = {"message": "", "token": self.token, "id": "pod-2"}
        rose = {"rate_micros_per_hour": 9_000_000, "since_wall": self.clock.wall()}
        for more in ({"code": "create.duplicate"}, {"code": "create.duplicate_gone"}, {"code": "price.rose", **rose}):
            yield 1, (Event.INCIDENT, {**about, **more})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a record's data, including nested ones."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield (*path, key)
        yield from places(below, (*path, key))


def put(records: Records, at: int, path: tuple[Any, ...], value: Any) -> Records:
    changed = copy.deepcopy(records)
    inner = changed[at]["data"]
    for key in path[:-1]:
        inner = inner[key]
    if value is LEFT_OUT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: "left out" if odd is LEFT_OUT else repr(odd))
def test_no_malformed_field_ends_what_looks_at_all_runs(home: Home, odd: object) -> None:
    run = RunWithCostFields(home).until_gone().settle()
    records = [json.loads(line) for line in run.folder.journal.read_bytes().splitlines()]
    seen = 0
    for at, record in enumerate(records):
        own = set(places(record["data"]))
        for path in own | ({("instance",), ("egress_micros",), ("drained_s",)} - own if odd is not LEFT_OUT else set()):
            chain_anew(run.folder.journal, put(records, at, path, odd))
            for sight, _ in look_at_all(home, planned_runs(home, only_open=False)):
                if sight:
                    run_data(sight, run_row(sight, run.clock.wall()))
            (row,) = audit(home).rows
            assert row.run == "fox-41"
            seen += 1
    assert seen > 100


def test_what_is_malformed_is_named_and_the_others_are_audited(home: Home) -> None:
    """`audit` must name the malformed field of one journal, and still audit the other runs."""
    run = RunWithCostFields(home).until_gone().settle()
    finished_run(home, "owl-07")
    records = [json.loads(line) for line in run.folder.journal.read_bytes().splitlines()]
    at = next(place for place, record in enumerate(records) if record["event"] == Event.DEATH_READ)
    chain_anew(run.folder.journal, put(records, at, ("alive_s_ago",), "x"))
    assert "alive_s_ago" in str(look_at_run(home, "fox-41").damage)
    broken, sound = audit(home).rows
    assert (broken.verdict, sound.problems) == ("does not hold", ())
    assert any(f"journal line {at + 1} " in problem and "alive_s_ago" in problem for problem in broken.problems)
