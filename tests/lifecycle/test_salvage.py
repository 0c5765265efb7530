"""Tests that pushed checkpoints are downloaded although the machine is lost, the laptop was closed, or both."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.journal_records import Phase, RunState
from gpurun.core.paths import Home, RunFolder
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import read_journal
from gpurun.ledger.run_state import next_step
from gpurun.lifecycle.artifacts.on_demand import download_pushed_files
from gpurun.lifecycle.job_spec import folder_of
from gpurun.providers.local import LocalProvider
from tests.emulators.s3 import S3Emulator
from tests.lifecycle import tiny_runs
from tests.lifecycle.stage import incidents, last_data, staged_run

STEPS = 60


def place_of(folder: RunFolder) -> str:
    return folder_of("s3://shards/gpt", folder.name, str(last_data(folder, "create.intended")["token"]))


def head(s3: S3Emulator, place: str) -> dict[str, Any]:
    if f"{place}/head" not in s3.keys(place):
        return {"manifest": {"latest": None}}
    return dict(json.loads(s3.content(f"{place}/head").partition(b"\n")[2]))


def until_pushed(s3: S3Emulator, place: str, step: int) -> None:
    for _ in ticks(SystemClock(), 0.1, 60):
        if head(s3, place)["manifest"]["latest"] == step:
            return
    pytest.fail(f"step {step} was never pushed: {head(s3, place)}")


@pytest.fixture
def lost(own: Home, s3: S3Emulator, request: pytest.FixtureRequest) -> RunFolder:
    """Return a run whose supervisor died when training began. Its machine finished, pushed its files, and is gone."""
    folder = staged_run(own, steps=STEPS)
    crash_at = getattr(request, "param", "after train.started")
    assert tiny_runs.drive(own, GPURUN_CRASH_AT=crash_at).returncode == -9
    until_pushed(s3, place_of(folder), STEPS)
    provider = LocalProvider(own, SystemClock())
    for instance in provider.find(None):
        provider.destroy(instance.id)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["after train.started", "before train.started"], indirect=True)
def test_a_closed_laptop_and_a_gone_machine_keep_the_checkpoints(own: Home, s3: S3Emulator, lost: RunFolder) -> None:
    assert tiny_runs.drive(own).returncode == 6, "the training is lost; what it left is not"
    events = tiny_runs.events_of(lost)
    assert events.index("death.proven") < events.index("salvage.observed") < events.index("receipt.observed")
    files = last_data(lost, "salvage.observed")["files"]
    assert {file["kind"] for file in files if file["step"] == STEPS} == {"weights", "optimizer", "state"}
    for file in files:
        assert hashlib.sha256((lost.artifacts / file["name"]).read_bytes()).hexdigest() == file["sha256"]
    report = audit(own)
    assert (report.problems, [row.problems for row in report.rows if row.run == lost.name]) == ((), [()])
    receipt = json.loads(lost.receipt.read_bytes())
    assert "payload" in receipt
    again = download_pushed_files(lost, "s3://shards/gpt", place_of(lost), SystemClock())
    assert (again.missing, len(again.here)) == ({}, len(files)), "asked once more by a person who wants to"


@pytest.mark.slow
def test_a_foreign_file_in_the_bucket_is_not_a_checkpoint(own: Home, s3: S3Emulator, lost: RunFolder) -> None:
    key = f"{place_of(lost)}/head"
    s3.alter(key, s3.content(key).replace(b'"latest": 60', b'"latest": 61'))
    assert tiny_runs.drive(own).returncode == 6
    assert "collect.bucket_altered" in incidents(lost)
    assert last_data(lost, "salvage.observed")["files"] == []
    assert not list(lost.artifacts.rglob("*.safetensors"))
    assert read_journal(lost.journal).damage is None


def test_a_good_end_leaves_its_bucket_checkpoints_unfetched(own: Home, s3: S3Emulator) -> None:
    folder = staged_run(own, steps=40, step_s=0.02)
    assert tiny_runs.drive(own).returncode == 0
    assert "salvage.intended" not in tiny_runs.events_of(folder)
    assert last_data(folder, "train.started")["pushed"] == place_of(folder)
    assert incidents(folder) == []
    written = [path.read_bytes() for path in own.root.rglob("*") if path.is_file()]
    assert not [content for content in written if b"X-Amz-Signature" in content]
    assert oct(folder.push_key.stat().st_mode & 0o777) == "0o600"


@pytest.mark.slow
def test_a_bucket_that_takes_no_urls_costs_only_its_copy(own: Home, s3: S3Emulator) -> None:
    folder = staged_run(own)
    assert tiny_runs.drive(own, GPURUN_CRASH_AT="after ship.observed").returncode == -9
    s3.denied.add("s3:ListBucket")
    assert tiny_runs.drive(own).returncode == 0
    assert incidents(folder) == ["stage.no_push"]
    assert list(folder.artifacts.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("stop", "reason", "step"), [("", "", "salvage"), ("destroy", "lease", "salvage"), ("destroy", "", "settle")]
)
def test_pushed_files_are_salvaged_unless_the_user_destroyed(stop: str, reason: str, step: str) -> None:
    state = RunState(run="fox-41", phase=Phase.GONE, pushed="gpt/runs/fox-41/gr-1", stop=stop, reason=reason)
    assert next_step(state) == step
    assert next_step(state.model_copy(update={"pushed": ""})) == "settle"
