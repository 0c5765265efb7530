"""Tests of a machine's upload URLs: the laptop renews them in time, and without harm to the training."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.core import paths
from gpurun.core.clock import SystemClock
from gpurun.core.errors import SetupError
from gpurun.lifecycle.job_spec import BRIEF_S, FRESH_S, Pushing
from gpurun.remote.interface import MachineLost
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_errors import BucketLost
from tests.emulators.s3 import KEY, SECRET, S3Emulator
from tests.refusals import refusal

PLACE = "gpt/runs/fox-41/gr-1"


class Waiting(SystemClock):
    """A clock whose sleeps take no time. Its wall time stays right, because S3 checks the time of signatures."""

    slept_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


class Machine:
    """A far side that records the push orders that it gets, and can be unreachable."""

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []
        self.is_lost, self.tries = False, 0

    def let_push(self, order: bytes) -> None:
        self.tries += 1
        if self.is_lost:
            raise MachineLost("It did not answer.")
        self.orders.append(json.loads(order))


@pytest.fixture
def clock() -> Waiting:
    return Waiting()


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def pushing(s3: S3Emulator, clock: Waiting, machine: Machine, tmp_path: Path) -> Pushing:
    choices, offer = SimpleNamespace(stage="s3://shards/gpt"), SimpleNamespace(provider="lambda", region="us-east-1")
    job = SimpleNamespace(checkpoint_bytes=12_000, more_kept=0, steps=30)
    plan = SimpleNamespace(choices=choices, run="fox-41", stage=None, offer=offer, job=job)
    folder = SimpleNamespace(push_key=tmp_path / "push.key", path=tmp_path)
    context = SimpleNamespace(
        clock=clock, plan=plan, folder=folder, seconds_left=lambda _: 3600.0, raise_if_stopped=lambda _: None
    )
    given = Pushing(SimpleNamespace(token="gr-1", pushed=PLACE), context, machine)
    assert given.give() == PLACE
    return given


def test_a_bucket_briefly_away_before_the_start_loses_nothing(
    clock: Waiting, machine: Machine, pushing: Pushing, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_mono, look = clock.monotonic() + 30, Bucket.look

    def away(bucket: Bucket) -> None:
        if clock.monotonic() < back_mono:
            raise BucketLost("no answer")
        look(bucket)

    monkeypatch.setattr(Bucket, "look", away)
    assert pushing.give() == PLACE
    back_mono += 3600
    with pytest.raises(BucketLost):
        pushing.give()
    assert clock.monotonic() < back_mono - 3600 + 90, "a minute, and the training waits no longer"


def test_a_full_disk_before_the_start_costs_only_the_pushing(
    pushing: Pushing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "push.key").unlink()

    def full(path: object, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(paths.os, "open", full)
    with refusal(SetupError, "stage.no_push", "No space left"):
        pushing.give()


@pytest.mark.parametrize(("is_session", "every_s"), [(False, FRESH_S), (True, BRIEF_S)], ids=["lasting", "session"])
def test_fresh_urls_come_as_often_as_the_key_wants(
    clock: Waiting, machine: Machine, pushing: Pushing, monkeypatch: pytest.MonkeyPatch, is_session: bool,
    every_s: float,
) -> None:  # fmt: skip
    assert (FRESH_S, BRIEF_S) == (12 * 3600, 15 * 60), "as docs/STAGE.md has it"
    if is_session:
        monkeypatch.setattr(type(pushing._bucket), "has_session", property(lambda _: True))
        pushing.give()
    given = len(machine.orders)
    for late in range(3):
        clock.sleep(every_s - 60)
        pushing.refresh()
        assert len(machine.orders) == given + late, "the old ones are good still"
        clock.sleep(60)
        pushing.refresh()
        assert len(machine.orders) == given + late + 1
    assert len({order["key"] for order in machine.orders}) == 1, "one key signs the list of one machine"


def test_a_key_renewed_in_its_file_is_used_once_the_old_ended(
    s3: S3Emulator, clock: Waiting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The user may sign in again each morning while the laptop watches for days: the new key must be used."""
    key_file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(key_file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    words = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    key_file.write_text(words.format("AKIAENDED", "x"))
    bucket = Bucket(parse_address("s3://shards/gpt"), clock)
    with refusal(SetupError, "stage.key"):
        bucket.look()
    key_file.write_text(words.format(KEY, SECRET))
    bucket.look()
    assert KEY in bucket.url_to_put("x", 60).reveal()


def test_a_failed_url_refresh_hurts_no_training_and_is_retried(
    clock: Waiting, machine: Machine, pushing: Pushing, s3: S3Emulator
) -> None:
    clock.sleep(FRESH_S)
    machine.is_lost = True
    for _ in range(3):
        pushing.refresh()
    assert machine.tries == 2, "not with every look"
    machine.is_lost = False
    s3.denied.add("s3:ListBucket")
    clock.sleep(BRIEF_S)
    pushing.refresh()
    s3.denied.clear()
    assert len(machine.orders) == 1
    clock.sleep(BRIEF_S)
    pushing.refresh()
    assert len(machine.orders) == 2
