"""Tests of the audit's findings for each kind of damage, and for each journal that cannot be true."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from drawing import check_scenes

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from gpurun.ledger.signing import PRIVATE_NAME, PUBLIC_NAME
from tests.unit.cost import dies
from tests.unit.ledger_samples import RATE, WEIGHTS, CloudRun, chain_anew, edit_lines, finished_run

Records = list[dict[str, Any]]
FAILED = {"step": "ship", "code": "x", "message": "x", "exit_code": 6}
PLACE = {"seq": 1, "sha256": "0" * 64}
FILE = {"bytes": 1, "sha256": "", "kind": "weights", "step": 1}


def _without(event: str) -> Callable[[Records], Records]:
    return lambda records: [record for record in records if record["event"] != event]


def _set(event: str, **data: Any) -> Callable[[Records], Records]:
    def edit(records: Records) -> Records:
        for record in records:
            if record["event"] == event:
                record["data"].update(data)
        return records

    return edit


def _swap(records: Records) -> Records:
    records[6], records[7] = records[7], records[6]
    return records


def _dearer(records: Records) -> Records:
    for record in records:
        if record["data"].get("instance"):
            record["data"]["instance"]["rate_micros_per_hour"] = RATE + 1
    return records


def _also(event: str, *, after: str, **data: Any) -> Callable[[Records], Records]:
    """Return an edit that adds a record to a journal, right after the record `after` and with its time."""

    def edit(records: Records) -> Records:
        place = [record["event"] for record in records].index(after)
        return [*records[: place + 1], {**records[place], "event": event, "data": data}, *records[place + 1 :]]

    return edit


STORIES: dict[str, Callable[[Records], Records]] = {
    "no intent": _without("create.intended"),
    "never ready": _without("ready.observed"),
    "no reads of its death": _without("death.read"),
    "never asked to end": _without("destroy.asked"),
    "training without a start": _without("train.started"),
    "never opened": _without("run.opened"),
    "two records swapped": _swap,
    "dearer than agreed": _dearer,
    "read as running": _set("death.read", state="RUNNING"),
    "read as listed": _set("death.read", listed=True),
    "reads of another machine": _set("death.read", id="pod-other"),
    "another digest of an answer": _set("death.read", answer_sha256="0" * 64),
    "two reads claimed": _set("death.proven", reads=2),
    "four reads claimed": _set("death.proven", reads=4),
    "too narrow a spread": _set("death.proven", spread_s=29.0),
    "too wide a spread": _set("death.proven", spread_s=300.0),
    "an end that is none": _set("death.proven", teardown="not_proven"),
    "another machine's create": _set("create.observed", token="gr-other"),
    "a worst case over the cap": _set("create.intended", worst_micros=13_000_000),
    "a worst case below the lease": _set("create.intended", worst_micros=1_000_000),
    "a deadline beyond the lease": _set("create.intended", deadline_wall=2e9),
    "another run's": _set("run.opened", run="owl-07"),
    "no lease": _set("create.intended", lease=None),
    "another receipt": _set("receipt.observed", seq=9),
    "made and refused": _also("create.refused", after="create.observed", reason="x", message="x"),
    "shipped after its death": _also("ship.intended", after="death.proven"),
    "failed and ended well": _also("step.failed", after="ready.observed", **FAILED),
    "a receipt before the death": _also("receipt.observed", after="collect.observed", **PLACE),
    "two receipts": _also("receipt.observed", after="receipt.observed", **PLACE),
    "a receipt after the end": _also("receipt.observed", after="run.closed", **PLACE),
    "closed twice": _also("run.closed", after="run.closed", exit_code=0),
    "a file that leads out": _set("collect.observed", files=[{"name": "../../../etc/passwd", **FILE}]),
}


def _tensors(*entries: dict[str, Any], content: bytes = b"", length: int | None = None) -> bytes:
    header = json.dumps({f"t{place}": entry for place, entry in enumerate(entries)}).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + content


def _entry(start: int, stop: int, shape: int = 2) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [shape], "data_offsets": [start, stop]}


DAMAGED: dict[str, bytes] = {
    "no header": b"weights" * 100,
    "too short": b"short",
    "a header beyond any file": _tensors(length=1 << 62),
    "a header beyond what is read": (20 << 20).to_bytes(8, "little") + bytes(21 << 20),
    "a header that is no JSON": (4).to_bytes(8, "little") + b"[[[[",
    "a header nested too deep": (10_000).to_bytes(8, "little") + b"[" * 5000 + b"]" * 5000,
    "no shape": _tensors({"dtype": "F32"}),
    "another shape": _tensors(_entry(0, 12), content=bytes(12)),
    "a file cut short": _tensors(_entry(0, 8), content=bytes(4)),
    "an overlap": _tensors(_entry(0, 8), _entry(4, 12), content=bytes(12)),
    "a gap": _tensors(_entry(0, 8), _entry(12, 20), content=bytes(20)),
    "more than its tensors": _tensors(_entry(0, 8), content=bytes(9)),
}
CHAINS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "first gone": lambda lines: lines[1:],
    "middle gone": lambda lines: [lines[0], *lines[2:]],
    "last gone": lambda lines: lines[:-1],
    "reordered": lambda lines: [lines[1], lines[0], lines[2]],
    "doubled": lambda lines: [*lines, lines[2]],
    "renumbered": lambda lines: [lines[0].replace(b'"seq":1', b'"seq":4'), *lines[1:]],
    "a hostile name": lambda lines: [lines[0].replace(b"fox-41", b"../../x"), *lines[1:]],
    "no name": lambda lines: [lines[0].replace(b'"fox-41"', b'["fox-41"]'), *lines[1:]],
}


@pytest.fixture
def new_home(tmp_path: Path) -> Callable[[], Home]:
    """Return a function that makes a new home at each call."""
    made: list[Home] = []

    def new() -> Home:
        made.append(Home(tmp_path / f"home-{len(made)}").prepare())
        return made[-1]

    return new


def said_of(home: Home, **options: Any) -> str:
    """Return what the audit of a home finds wrong, one finding a line, without digests of keys."""
    report = audit(home, **options)
    lines = []
    for row in report.rows:
        lines += [f"{row.run}: {text}" for text in row.problems]
        lines += [f"{row.run}, a warning: {text}" for text in row.warnings]
    lines += [f"the chain: {text}" for text in report.problems]
    return re.sub(r"[0-9a-f]{12}…", "KEY…", "\n".join(lines))


def test_stories_that_cannot_have_happened(new_home: Callable[[], Home]) -> None:
    """The journals are chained and sealed again, so that no hash gives them away."""
    scenes = {}
    for scene, edit in STORIES.items():
        folder = finished_run(home := new_home())
        chain_anew(folder.journal, edit([json.loads(line) for line in folder.journal.read_bytes().splitlines()]))
        scenes[scene] = said_of(home)
    check_scenes("audit-stories.txt", scenes)


def test_checkpoints_that_are_no_safetensors(new_home: Callable[[], Home]) -> None:
    scenes = {}
    for scene, content in DAMAGED.items():

        class Lying(CloudRun):
            @staticmethod
            def contents(content: bytes = content) -> dict[str, bytes]:
                return {**CloudRun.contents(), WEIGHTS: content}

        Lying(home := new_home()).until_gone().settle()
        scenes[scene] = said_of(home)
    check_scenes("audit-checkpoints.txt", scenes)


def test_chains_that_were_cut_or_reordered(new_home: Callable[[], Home]) -> None:
    scenes = {}
    for scene, edit in CHAINS.items():
        home = new_home()
        for name in ("fox-41", "owl-07", "elk-33"):
            finished_run(home, name)
        edit_lines(home.ledger, edit)
        scenes[scene] = said_of(home)
    check_scenes("audit-chains.txt", scenes)


def test_files_that_were_changed_or_taken_away(new_home: Callable[[], Home]) -> None:
    scenes = {}
    for name in ("request", "plan", "log", "events"):
        path: Path = getattr(finished_run(home := new_home()), name)
        path.write_bytes(path.read_bytes() + b"\n")
        scenes[f"{path.name} changed"] = said_of(home)
    folder = finished_run(home := new_home())
    (folder.artifacts / WEIGHTS).write_bytes(b"heavier" * 100)
    scenes["a checkpoint changed"] = said_of(home)
    (folder.artifacts / WEIGHTS).unlink()
    scenes["a checkpoint gone"] = said_of(home)
    envelope = json.loads(folder.receipt.read_bytes())
    folder.receipt.write_text(json.dumps({**envelope, "signatures": []}))
    scenes["a signature taken off"] = said_of(home)
    folder.receipt.write_text(json.dumps({**envelope, "payload": "A" + envelope["payload"][1:]}))
    scenes["an edited receipt"] = said_of(home)
    folder.receipt.unlink()
    scenes["a receipt gone"] = said_of(home)
    finished_run(home := new_home())
    stranger = finished_run(new_home())
    scenes["another's key"] = said_of(home, public_key=(Home(stranger.path.parents[1]).keys / PUBLIC_NAME).read_bytes())
    public_key = (home.keys / PUBLIC_NAME).read_bytes()
    (home.keys / PRIVATE_NAME).unlink()
    finished_run(home, "owl-07")
    scenes["a run without a signature"] = said_of(home)
    scenes["the same where a key is named"] = said_of(home, public_key=public_key)
    check_scenes("audit-files.txt", scenes)


def test_runs_that_broke_a_promise(new_home: Callable[[], Home]) -> None:
    scenes = {}
    run = CloudRun(home := new_home())
    run.write(run.opened(), run.intended(), run.created(), run.intended(2))
    scenes["a second machine before the first was gone"] = said_of(home)
    CloudRun(home := new_home()).until_gone().write((Event.RUN_CLOSED, {"exit_code": 0}))
    scenes["closed without a receipt"] = said_of(home)
    run = CloudRun(home := new_home(), cap=11_230_000)
    run.write(run.opened(), run.intended(), run.created()).play(run.through_training())
    run.clock.sleep(4 * 3600)
    dies(run, alive_s_ago=5.0)
    run.settle()
    scenes["over the cap"] = said_of(home)
    run = CloudRun(home := new_home())
    run.write(run.opened(), run.intended(), run.created()).play(run.through_training())
    *reads, (_, (event, claim)) = run.death(gap_s=0.1)
    run.play(iter(reads))
    run.clock.sleep(30)
    run.write((event, {**claim, "spread_s": 30.0})).settle()
    scenes["reads of one moment"] = said_of(home)
    check_scenes("audit-promises.txt", scenes)
