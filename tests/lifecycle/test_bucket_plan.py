"""Tests of a plan's bucket: files already in it, planned uploads, time saved, and errors found before renting."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.errors import GpurunError, UsageError
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Mode, Plan
from gpurun.core.uplink import Uplink
from gpurun.planning import staging
from gpurun.planning.staging import with_stage
from gpurun.planning.transfer import staged_uplink_bits_per_s
from gpurun.remote.archive import PackedFile, Survey, survey
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_upload import digests_of, stage_file
from gpurun.view.plan_screen import plan_text
from gpurun.view.style import Style
from tests.changed_plan import changed_plan
from tests.emulators.s3 import S3Emulator
from tests.lifecycle import tiny_runs
from tests.lifecycle.drive import TINY
from tests.refusals import lacking, refusal

SIZE = 1 << 20


@pytest.fixture
def plan(own: Home) -> Plan:
    """Return a paid plan with two shards of one megabyte each."""
    made = Plan.from_json(tiny_runs.make_run(own).plan.read_bytes())
    folder, shards = Path(made.data.folder), []
    for number in (2, 3):
        content = bytes([number]) * SIZE
        (folder / f"train_00000{number}.bin").write_bytes(content)
        shards.append({"name": f"train_00000{number}.bin", "sha256": hashlib.sha256(content).hexdigest()})
    (folder / "data.json").write_text(json.dumps({"v": 1, "train": shards, "val": []}))
    offer = made.offer.model_copy(update={"provider": "aws", "rate_micros_per_hour": usd(24), "region": "us-west-2"})
    choices = made.choices.model_copy(update={"stage": "s3://shards/gpt"})
    return changed_plan(made, {"mode": Mode.PAID, "offer": offer, "choices": choices})


def seen(plan: Plan) -> Survey:
    return survey(plan.job.workload(plan, TINY / "trainer", cpus=1).uploads)


def test_a_plan_says_what_is_staged_and_what_that_saves(s3: S3Emulator, plan: Plan, tmp_path: Path) -> None:
    bucket = Bucket(parse_address("s3://shards/gpt"), SystemClock())
    first = next(file for file in seen(plan).files if file.name == "data/train_000002.bin")
    stage_file(bucket, first, digests_of(first, lambda: None), tmp_path, lambda _: None)
    stage = with_stage(plan, seen(plan), SystemClock()).stage
    assert stage is not None
    assert (stage.files, stage.bytes, stage.there_files, stage.there_bytes) == (2, 2 * SIZE, 1, SIZE)
    assert (stage.upload_s, stage.saves_s) == (1, 0)
    large = stage.model_copy(update={"bytes": 10**10, "there_bytes": 9 * 10**9, "upload_s": 400, "saves_s": 3920})
    shown = plan_text(plan.model_copy(update={"stage": large}), Style(width=100, unicode=False))
    text = " ".join(shown.split())
    assert lacking(text, "1 of 2 files", "9 GB", "1 GB", "6 m 40 s", "20 Mbit/s") == []
    assert "$26.1" in text, "sixty-five minutes of a machine for $24 an hour"
    assert "URLs" in text


def test_a_plan_without_a_bucket_asks_no_bucket(plan: Plan) -> None:
    without = plan.model_copy(update={"choices": plan.choices.model_copy(update={"stage": ""})})
    assert with_stage(without, seen(plan), SystemClock()) == without


def test_a_plan_with_a_dear_upload_says_what_a_bucket_saves(plan: Plan) -> None:
    without = plan.model_copy(update={"choices": plan.choices.model_copy(update={"stage": ""})})
    large = Survey((PackedFile("data/train_000001.bin", 10**9, b""),), ())
    note = with_stage(without, large, SystemClock()).notes[-1]
    assert "7 min" in note, "8,000 megabits at 20 a second instead of 1,000"
    assert "$2.62" in note, "of a machine for $24 an hour"
    assert "--stage s3://BUCKET/PREFIX" in note
    free = changed_plan(without, {"offer": without.offer.model_copy(update={"rate_micros_per_hour": 0})})
    assert with_stage(free, large, SystemClock()) == free


def test_bucket_trouble_is_reported_before_anything_is_rented(s3: S3Emulator, plan: Plan) -> None:
    s3.denied.add("s3:GetObject")
    with refusal(GpurunError, "stage.denied", "s3:GetObject"):
        with_stage(plan, seen(plan), SystemClock())


def test_a_local_run_stages_nothing_and_a_rehearsal_says_so(s3: S3Emulator, plan: Plan) -> None:
    with refusal(UsageError, "stage.local"):
        with_stage(plan.model_copy(update={"mode": Mode.LOCAL}), None, SystemClock())
    rehearsal = with_stage(plan.model_copy(update={"mode": Mode.REHEARSAL}), None, SystemClock())
    assert (rehearsal.stage, "paid" in rehearsal.notes[-1], s3.calls) == (None, True, [])


def test_an_unusual_endpoint_is_noted(s3: S3Emulator, plan: Plan) -> None:
    notes = " ".join(with_stage(plan, None, SystemClock()).warnings)
    for said in (s3.environment["AWS_ENDPOINT_URL_S3"], "not encrypted"):
        assert said in notes


AWS = "https://s3.eu-west-1.amazonaws.com"


@pytest.mark.parametrize(
    ("provider", "endpoint", "figures"),
    [
        ("runpod", AWS, ("$1.80", "20 GB")),
        ("aws", AWS, ("eu-west-1", "us-west-2", "$0.02 a GB")),
        ("aws", AWS, ("18 GB",)),
        ("aws", "https://x.r2.cloudflarestorage.com", ("18 GB",)),
    ],
)
def test_a_plan_says_if_the_cap_covers_the_buckets_cost(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, provider: str, endpoint: str, figures: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Bucket, "look", lambda _: None)
    monkeypatch.setattr(Bucket, "endpoint", endpoint)
    monkeypatch.setattr(Bucket, "region", "eu-west-1")
    monkeypatch.setattr(staging, "_in_bucket", lambda *_: [])
    changes = {"offer": plan.offer.model_copy(update={"provider": provider}), "parameters": 250_000_000}
    large = Survey((PackedFile("data/train_000001.bin", 20 * 10**9, b""),), ())
    notes = " ".join(with_stage(changed_plan(plan, changes), large, SystemClock()).warnings)
    assert lacking(notes, "billed", *figures) == []
    assert ("18 GB" in notes) is (provider == "aws")


@pytest.mark.parametrize(
    ("endpoint", "provider", "is_warned_of"),
    [
        ("http://localhost:9000", "runpod", True),
        ("http://192.168.1.5:9000", "aws", True),
        ("http://[fd00::5]:9000", "lambda", True),
        ("http://192.168.1.5:9000", "ssh", False),
        ("https://minio.example.com", "runpod", False),
        ("https://1.1.1.1", "runpod", False),
    ],
)
def test_a_bucket_in_a_private_network_is_called_unreachable(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, endpoint: str, provider: str, is_warned_of: bool
) -> None:
    monkeypatch.setattr(Bucket, "look", lambda _: None)
    monkeypatch.setattr(Bucket, "endpoint", endpoint)
    offer = plan.offer.model_copy(update={"provider": provider})
    warnings = with_stage(changed_plan(plan, {"offer": offer}), None, SystemClock()).warnings
    assert any(lacking(warning, endpoint, "own network", "SSH") == [] for warning in warnings) is is_warned_of


def test_a_machine_beside_the_bucket_is_told_of_no_traffic(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "look", lambda _: None)
    monkeypatch.setattr(Bucket, "endpoint", "https://s3.us-west-2.amazonaws.com")
    monkeypatch.setattr(Bucket, "region", "us-west-2")
    (warning,) = with_stage(plan, None, SystemClock()).warnings
    assert "Files stay in the bucket" in warning


def test_advice_to_use_a_bucket_says_what_aws_would_bill(plan: Plan) -> None:
    offer = plan.offer.model_copy(update={"provider": "runpod"})
    choices = plan.choices.model_copy(update={"stage": ""})
    large = Survey((PackedFile("data/train_000001.bin", 10**10, b""),), ())
    note = with_stage(changed_plan(plan, {"offer": offer, "choices": choices}), large, SystemClock()).notes[-1]
    assert "$0.90" in note


def test_only_large_files_are_counted_as_coming_from_the_bucket(tmp_path: Path) -> None:
    (tmp_path / "large.bin").write_bytes(bytes(SIZE))
    assert staged_uplink_bits_per_s(tmp_path, SIZE, Uplink()) == pytest.approx(1e9)
    (tmp_path / "small.json").write_bytes(bytes(100_000))
    whole = SIZE + 100_000
    assert 100_000 * 8 / 20e6 < whole * 8 / staged_uplink_bits_per_s(tmp_path, whole, Uplink()) < 0.05
