"""Tests of a run whose shards go through a bucket: staged once, before renting. A failing bucket never ends the run."""

from __future__ import annotations

import pytest

from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from tests.emulators.s3 import S3Emulator
from tests.lifecycle import tiny_runs
from tests.lifecycle.stage import SIZE, incidents, last_data, staged_run


def test_a_second_run_of_the_same_shards_uploads_no_byte(own: Home, s3: S3Emulator) -> None:
    first = staged_run(own, "fox-41")
    assert tiny_runs.drive(own, "fox-41").returncode == 0
    events = tiny_runs.events_of(first)
    assert events[:4] == ["run.opened", "stage.intended", "stage.observed", "create.intended"]
    assert last_data(first, "stage.observed")["sent_bytes"] > SIZE * 0.9
    shipped = last_data(first, "ship.observed")
    assert (shipped["pulled_files"], shipped["pulled_bytes"] > SIZE * 0.9, shipped["sent_bytes"] < 20_000) == (
        1, True, True,
    )  # fmt: skip
    uploaded = s3.uploaded_bytes("gpt/files/")

    second = staged_run(own, "owl-7")
    assert tiny_runs.drive(own, "owl-7").returncode == 0
    assert last_data(second, "stage.observed")["sent_bytes"] == 0
    assert last_data(second, "stage.observed")["there_bytes"] == SIZE
    assert s3.uploaded_bytes("gpt/files/") == uploaded
    assert incidents(second) == []
    assert audit_of(own) == []


def audit_of(home: Home) -> list[str]:
    report = audit(home)
    return [*report.problems, *(problem for row in report.rows for problem in row.problems)]


@pytest.mark.parametrize("denied", ["s3:ListBucket", "s3:PutObject"])
def test_a_bucket_that_refuses_ends_the_run_before_renting(own: Home, s3: S3Emulator, denied: str) -> None:
    folder = staged_run(own)
    s3.denied.add(denied)
    assert tiny_runs.drive(own).returncode == 4
    assert "create.intended" not in tiny_runs.events_of(folder)
    assert denied in last_data(folder, "step.failed")["message"]


def test_a_home_that_takes_no_upload_notes_rents_nothing(own: Home, s3: S3Emulator) -> None:
    """If upload notes cannot be written, because the folder is root's or the disk is full, nothing must be rented."""
    folder = staged_run(own)
    own.cache.mkdir(parents=True)
    own.uploads.write_bytes(b"a file in the folder's place")
    assert tiny_runs.drive(own).returncode == 4
    assert "create.intended" not in tiny_runs.events_of(folder)
    assert "at cache/uploads: " in last_data(folder, "step.failed")["message"]


def test_a_run_that_is_killed_during_the_upload_goes_on_with_it(own: Home, s3: S3Emulator) -> None:
    folder = staged_run(own)
    assert tiny_runs.drive(own, GPURUN_CRASH_AT="after s3.put_object > after s3.put_object").returncode == -9
    assert len(s3.keys("gpt/files/")) == 1, "the shard is there, its index is not"
    assert tiny_runs.drive(own).returncode == 0
    assert tiny_runs.events_of(folder).count("stage.observed") == 1
    assert audit_of(own) == []


@pytest.mark.slow
def test_an_altered_object_goes_over_ssh_and_is_staged_anew(own: Home, s3: S3Emulator) -> None:
    staged_run(own, "fox-41")
    assert tiny_runs.drive(own, "fox-41").returncode == 0
    key = next(key for key in s3.keys("gpt/files/") if key.endswith(".zst"))
    good = s3.content(key)
    s3.alter(key)
    second = staged_run(own, "owl-7")
    assert tiny_runs.drive(own, "owl-7").returncode == 0
    assert incidents(second) == ["stage.altered"]
    assert last_data(second, "ship.observed")["sent_bytes"] > SIZE * 0.9
    third = staged_run(own, "bee-3")
    assert tiny_runs.drive(own, "bee-3").returncode == 0
    assert (incidents(third), s3.content(key)) == ([], good)
    assert last_data(third, "stage.observed")["sent_bytes"] > SIZE * 0.9


@pytest.mark.slow
def test_a_bucket_lost_after_renting_costs_only_an_upload(own: Home, s3: S3Emulator) -> None:
    folder = staged_run(own)
    assert tiny_runs.drive(own, GPURUN_CRASH_AT="after create.observed").returncode == -9
    s3.denied |= {"s3:ListBucket", "s3:GetObject"}
    assert tiny_runs.drive(own).returncode == 0
    assert incidents(folder) == ["stage.not_pulled", "stage.no_push"]
    assert last_data(folder, "ship.observed")["sent_bytes"] > SIZE * 0.9
