"""Tests of whole rentals that get shards from a bucket and upload checkpoints to it, with real commands and sshd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.journal_records import Event
from gpurun.ledger.journal import read_journal
from tests.clouds.rented import CLOUDS, User, kill_supervisors, somebody, supervisors
from tests.emulators import guests
from tests.emulators.s3 import S3Emulator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot"),
    pytest.mark.xdist_group("rentals by a bucket"),
]

STAGE = ("--stage", "s3://shards/lab")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Emulator]:
    with S3Emulator() as emulator:
        yield emulator


@pytest.fixture(scope="module")
def user(s3: S3Emulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("staged")
    with CLOUDS["runpod"](folder / "cloud") as cloud:
        keyed = replace(cloud, environment={**cloud.environment, **s3.environment})
        with somebody(keyed, folder / "home") as user:
            yield user


def fields_of(user: User, event: Event, name: str) -> dict[str, object]:
    records = read_journal(user.home / "runs" / name / "journal.jsonl").records
    return next(dict(record.data) for record in reversed(records) if record.event is event)


def test_a_staged_run_pulls_and_pushes_and_the_next_uploads_none(user: User, s3: S3Emulator) -> None:
    done = user.trains(*STAGE)
    assert done.returncode == 0, done.stderr + user.said()
    assert "s3://shards/lab" in user.types("receipt", "fox-41").stdout
    way = user.envelope("receipt", "fox-41")[1]["data"]["statement"]["predicate"]["shipping"]
    shards = s3.uploaded_bytes("lab/files/")
    assert way["from_bucket_bytes"] > 100_000
    assert way["to_bucket_bytes"] <= shards
    pushed = str(fields_of(user, Event.TRAIN_STARTED, "fox-41")["pushed"])
    assert f"{pushed}/head" in s3.keys(pushed)

    again = user.trains(*STAGE, name="owl-7")
    assert again.returncode == 0, again.stderr + user.said("owl-7")
    assert fields_of(user, Event.STAGE_OBSERVED, "owl-7")["sent_bytes"] == 0
    assert s3.uploaded_bytes("lab/files/") == shards
    code, audit = user.envelope("audit")
    assert (code, audit["ok"]) == (0, True), json.dumps(audit)

    secrets = [value.encode() for name, value in user.cloud.environment.items() if "KEY" in name]
    written = [path.read_bytes() for path in user.home.rglob("*") if path.is_file()]
    assert not [data for data in written if b"X-Amz-Signature" in data or any(secret in data for secret in secrets)]


@pytest.fixture(scope="module")
def taken_away(user: User, s3: S3Emulator) -> str:
    """Return the name of a run that was resumed after its machine had vanished while no supervisor drove it."""
    started = user.trains(*STAGE, "--set", "train.steps=100000", "--detach", name="bee-3")
    assert started.returncode == 0, started.stderr
    pushed = ""
    for _ in ticks(SystemClock(), 0.2, 180):
        pushed = pushed or place(user, s3, "bee-3")
        if pushed:
            break
    assert pushed, user.said("bee-3")
    kill_supervisors(user.home)
    assert supervisors(user.home) == []
    world = user.cloud.emulator.world
    with world.lock:
        for pod in list(world.alive):
            world.delete(pod.id)
    code, _ = user.envelope("resume", "bee-3")
    assert code == 6, user.said("bee-3")
    return "bee-3"


def test_a_closed_laptop_finds_a_lost_machines_work_in_a_bucket(user: User, taken_away: str) -> None:
    assert fields_of(user, Event.SALVAGE_OBSERVED, taken_away)["brought"], user.said(taken_away)
    home = user.home / "runs" / taken_away / "artifacts"
    assert list(Path(home).rglob("*.safetensors"))
    assert user.envelope("audit")[0] == 0


def place(user: User, s3: S3Emulator, name: str) -> str:
    """Return where in the bucket the run keeps its list of files; empty before the first list is there."""
    if Event.TRAIN_STARTED not in user.events(name):
        return ""
    found = str(fields_of(user, Event.TRAIN_STARTED, name).get("pushed", ""))
    return found if f"{found}/head" in s3.keys(found) else ""


def test_a_new_rental_continues_what_a_lost_machine_brought_home(user: User, taken_away: str) -> None:
    words = ("--max-cost", "5", "--hours", "0.005", "--provider", "runpod", "--accept-cpu", *STAGE)
    done = user.types("train", "--from", taken_away, *words, "--yes", "--json", "--name", "cow-5")
    assert done.returncode == 7, done.stderr + user.said("cow-5")
    before = user.envelope("receipt", taken_away)[1]["data"]["statement"]["predicate"]
    after = user.envelope("receipt", "cow-5")[1]["data"]["statement"]["predicate"]
    assert after["asked"]["continues"]["run"] == taken_away
    assert after["asked"]["continues"]["step"] == before["checkpoint"]["latest"]
    start = json.loads((user.home / "runs/cow-5/events.jsonl").read_text().splitlines()[0])
    assert start["resumed_from"] == before["checkpoint"]["latest"]
    assert after["checkpoint"]["latest"] > before["checkpoint"]["latest"]
    assert after["cost"]["cap_kept"] is True
    assert user.cloud.alive() == []
    assert user.envelope("audit")[0] == 0


def test_a_run_that_moves_takes_its_shards_from_the_bucket_again(user: User, s3: S3Emulator) -> None:
    long = ("--set", "train.steps=400", "--set", "train.checkpoint_every=100")
    started = user.trains(*STAGE, *long, "--keep-going", "--detach", name="elk-9")
    assert started.returncode == 0, started.stderr
    assert any(place(user, s3, "elk-9") for _ in ticks(SystemClock(), 0.2, 180)), user.said("elk-9")
    kill_supervisors(user.home)
    world, uploaded = user.cloud.emulator.world, s3.uploaded_bytes("lab/files/")
    with world.lock:
        for pod in list(world.alive):
            world.delete(pod.id)
    resumed = user.types("resume", "elk-9", "--json", timeout_s=400.0)
    assert resumed.returncode == 0, user.said("elk-9")
    records = read_journal(user.home / "runs/elk-9/journal.jsonl").records
    first, second = (record.data for record in records if record.event is Event.SHIP_OBSERVED)
    assert second["pulled_files"] == first["pulled_files"] > 0
    (leg,) = (record.data for record in records if record.event is Event.LEG_PLANNED)
    assert leg["step"] >= 100, "its checkpoint came home from the bucket"
    checkpoint = sum(file["bytes"] for file in leg["files"])
    assert second["sent_bytes"] <= first["sent_bytes"] + checkpoint + 20_000, "beside it only the checkpoint is sent"
    assert s3.uploaded_bytes("lab/files/") == uploaded
    assert user.cloud.alive() == []
    assert user.envelope("audit")[0] == 0


COMMAND = """\
import json, os, time
os.makedirs("out", exist_ok=True)
for step in range(100000):
    print(f"step {step} | loss 1.0", flush=True)
    if step % 20 == 0:
        json.dump({"step": step}, open("out/ckpt.json", "w"))
        time.sleep(5)
"""


def test_a_lost_commands_newest_checkpoint_is_in_the_bucket(user: User, s3: S3Emulator, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(COMMAND)
    started = user.types(
        "run", "--provider", "runpod", *user.cloud.asks, "--max-cost", "5", *STAGE, "--yes", "--name", "ram-2",
        "--detach", "--checkpoint-glob", "out/ckpt.json", str(tmp_path / "loop.py"),
    )  # fmt: skip
    assert started.returncode == 0, started.stderr + user.said("ram-2")
    assert any(place(user, s3, "ram-2") for _ in ticks(SystemClock(), 0.2, 180)), user.said("ram-2")
    kill_supervisors(user.home)
    world = user.cloud.emulator.world
    with world.lock:
        for pod in list(world.alive):
            world.delete(pod.id)
    assert user.envelope("resume", "ram-2")[0] == 6, user.said("ram-2")
    (saved,) = (user.home / "runs/ram-2/artifacts").rglob("ckpt.json")
    assert json.loads(saved.read_text())["step"] % 20 == 0
    assert user.envelope("audit", "ram-2")[0] == 0
