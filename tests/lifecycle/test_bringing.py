"""Tests of the download at the end of a run: its order, full disks, and files that are locked or damaged."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.core.errors import CollectFailed, ExitCode, StoreFull
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.ledger.runs import look_at_run
from gpurun.lifecycle.artifacts.downloader import STUCK_S
from gpurun.lifecycle.artifacts.inventory import Inventory, due_files, spare_files
from gpurun.lifecycle.steps import watch_training
from gpurun.remote import resumable_file
from gpurun.remote.download import PARTIAL_FOLDER
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, Best, Manifest, ManifestFile
from tests.lifecycle import scripted_cloud
from tests.lifecycle.bringing import collected
from tests.lifecycle.faults import ended, kept, receipt_of
from tests.lifecycle.scripted_cloud import LEASE, SPARE, WEIGHTS, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


BEST, LATEST, OPTIMIZER = (name for name, _, _ in WEIGHTS)
FULL = StoreFull("collect.disk_full", "There is no room for it.", hint="Free some space.")


def fetched(world: World) -> list[str]:
    """Return a list that will name each file requested from the machine from now on, once and in order."""
    names, passing = list[str](), world.cloud.passing

    def hear(place: str) -> None:
        name = place.removeprefix("before far.get ")
        if name != place and name not in names:
            names.append(name)
        passing(place)

    world.cloud.passing = hear
    return names


def stale(copied: str) -> Callable[..., os.stat_result]:
    """Return an `os.stat` that fails for paths that end in `copied`, as it does after a restart of a file server."""
    stat = os.stat

    def out_of_reach(path: Any, *rest: Any, **more: Any) -> os.stat_result:
        if str(path).endswith(copied):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, *rest, **more)

    return out_of_reach


def after(world: World, seconds: float, do: Callable[[], object]) -> None:
    """Make the virtual clock call `do` once, when it first shows `seconds` or more."""
    sleep, done = world.clock.sleep, list[float]()

    def waking(for_s: float) -> None:
        sleep(for_s)
        if not done and world.clock.monotonic() >= seconds:
            done.append(seconds)
            do()

    world.clock.sleep = waking  # type: ignore[method-assign]


# Order


def test_latest_comes_first_then_best_and_the_one_before_stays(world: World) -> None:
    names = fetched(world)
    assert world.drive() is ExitCode.DONE
    assert names == [LATEST, OPTIMIZER, BEST]
    assert (collected(world)["missing"], collected(world)["left"]) == ([], [SPARE[0]])
    assert receipt_of(world)["checkpoint"]["missing"] == [], "it was not wanted, so nobody misses it"
    assert kept(world)


def listing(*files: tuple[str, str, int], latest: int | None, best: int | None) -> Manifest:
    found = [ManifestFile(name=name, bytes=1, sha256="0" * 64, kind=kind, step=step) for name, kind, step in files]
    return Manifest(latest=latest, best=Best(step=best, val_loss=2.0) if best else None, files=tuple(found))


SEVERAL = (
    ("s1", "sample", 10), ("c", "compile_cache", 10), ("w10", "weights", 10), ("o20", "optimizer", 20),
    ("w20", "weights", 20), ("w30", "weights", 30), ("s3", "sample", 30), ("o30", "optimizer", 30),
    ("t30", "state", 30), ("t10", "state", 10),
)  # fmt: skip


@pytest.mark.parametrize(
    ("latest", "best", "order", "left"),
    [
        (30, 10, "t30 w30 o30 t10 w10 s3 c s1", "o20 w20"),
        (30, 20, "t30 w30 o30 w20 o20 s3 c s1", "w10 t10"),
        (30, 30, "t30 w30 o30 s3 c s1", "w10 o20 w20 t10"),
        (30, None, "t30 w30 o30 s3 c s1", "w10 o20 w20 t10"),
        (40, None, "s3 c s1 t30 w30 o30 w20 o20 t10 w10", ""),
        (None, None, "s3 c s1 t30 w30 o30 w20 o20 t10 w10", ""),
    ],
)
def test_what_is_worth_most_is_wanted_first(latest: int | None, best: int | None, order: str, left: str) -> None:
    """If the list has no latest checkpoint, or names one whose files it lacks, every checkpoint is downloaded."""
    manifest = listing(*SEVERAL, latest=latest, best=best)
    assert " ".join(file.name for file in due_files(manifest)) == order
    assert " ".join(file.name for file in spare_files(manifest)) == left


def test_kept_checkpoints_come_home_only_as_far_as_planned() -> None:
    manifest = listing(*SEVERAL, latest=30, best=None)
    assert " ".join(file.name for file in due_files(manifest, keep=1)) == "t30 w30 o30 s3 c s1 t10 w10"
    assert " ".join(file.name for file in spare_files(manifest, keep=1)) == "o20 w20"


def damage(world: World, *damaged: str) -> None:
    fetch = world.far.fetch

    def refusing(name: str, *rest: Any, **more: Any) -> Path:
        if name in damaged:
            raise CollectFailed(
                "collect.wrong_digest", f"{name} was downloaded 4 times, always with another digest.", hint="?"
            )
        return fetch(name, *rest, **more)

    world.far.fetch = refusing  # type: ignore[method-assign]


def test_the_one_before_replaces_a_damaged_latest(world: World) -> None:
    damage(world, LATEST)
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert SPARE[0] in {file["name"] for file in collected(world)["files"]}
    assert collected(world)["missing"] == [LATEST]
    assert "left" not in collected(world)
    assert kept(world)


def test_both_damaged_are_missing_and_never_called_left_there(world: World) -> None:
    damage(world, LATEST, SPARE[0])
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert sorted(collected(world)["missing"]) == sorted([LATEST, SPARE[0]])
    assert "left" not in collected(world)


def test_a_small_file_unlike_the_list_is_fetched_again_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files come in one stream.

    One that differs from the list must be fetched again, or the receipt would vouch for wrong bytes.
    """
    texts = {f"samples/{step:06d}-0.txt": b"The def %06d" % step for step in range(20)}
    names, manifest, spoilt = fetched(world), world.far.manifest, "samples/000007-0.txt"
    listed = [
        ManifestFile(name=name, bytes=len(text), sha256=hashlib.sha256(text).hexdigest(), kind="sample", step=30)
        for name, text in texts.items()
    ]
    contents = texts | {name: content for name, content, _ in scripted_cloud.FINISHED}

    def gather(files: list[ManifestFile], take: Callable[[ManifestFile, bytes], None]) -> list[ManifestFile]:
        for file in files:
            take(file, contents[file.name].swapcase() if file.name == spoilt else contents[file.name])
        return []

    monkeypatch.setattr(scripted_cloud, "FINISHED", [(name, content, 30) for name, content in contents.items()])
    world.far.manifest = lambda most: manifest(most).model_copy(  # type: ignore[method-assign]
        update={"files": (*(file for file in manifest(most).files if file.name not in texts), *listed)}
    )
    world.far.gather = gather  # type: ignore[method-assign,assignment]
    assert world.drive() is ExitCode.DONE
    assert names == [spoilt]
    assert {name: (world.folder.artifacts / name).read_bytes() for name in texts} == texts
    assert kept(world)


def test_the_one_before_does_not_replace_a_damaged_best(world: World) -> None:
    damage(world, BEST)
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert (collected(world)["missing"], collected(world)["left"]) == ([BEST], [SPARE[0]])
    assert kept(world)


def test_what_came_home_early_of_the_one_before_is_on_record(world: World) -> None:
    (world.folder.artifacts / "checkpoints").mkdir(parents=True)
    (world.folder.artifacts / SPARE[0]).write_bytes(SPARE[1])
    assert world.drive() is ExitCode.DONE
    assert SPARE[0] in {file["name"] for file in receipt_of(world)["checkpoint"]["files"]}
    assert "left" not in collected(world)
    assert kept(world)


def test_no_machine_waits_for_a_spare_file_that_does_not_fit(
    world: World, room: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of the spare checkpoint is at home; the disk has no room for the other.

    The run must not pay for the machine to wait for it.
    """
    more = ("checkpoints/000025.optim.safetensors", b"\x1a" * 5000, 25)
    monkeypatch.setattr(scripted_cloud, "FINISHED", [*scripted_cloud.FINISHED, more])
    room["bytes"] = 20_100
    (world.folder.artifacts / "checkpoints").mkdir(parents=True)
    (world.folder.artifacts / SPARE[0]).write_bytes(SPARE[1])
    assert world.drive() is ExitCode.DONE
    assert (world.cloud.boxes[0].died_s or 0) < 250, "not at the end of its lease"
    assert SPARE[0] in {file["name"] for file in collected(world)["files"]}
    assert (collected(world)["missing"], collected(world)["left"]) == ([], [more[0]])
    assert kept(world)


def test_with_the_latest_at_home_the_one_before_is_not_missed(world: World) -> None:
    def vanish() -> None:
        if world.far.polls == 3:
            Inventory(world.folder).remember(world.far.manifest(MOST_ANNOUNCED_BYTES))
            (world.folder.artifacts / "checkpoints").mkdir(parents=True)
            for name, content, _ in WEIGHTS:
                (world.folder.artifacts / name).write_bytes(content)
            world.cloud.boxes[0].died_s = world.cloud.now

    world.far.during = vanish
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert (collected(world)["missing"], collected(world)["left"]) == ([], [SPARE[0]])
    assert kept(world)


# Room


@pytest.fixture
def room(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Provide the size of a simulated disk as `room["bytes"]`, which a test may change.

    The files in artifacts/ fill the disk.
    """
    disk = {"bytes": 12_000}

    def usage(_: object) -> SimpleNamespace:
        taken = sum(path.stat().st_size for path in world.folder.artifacts.rglob("*") if path.is_file())
        return SimpleNamespace(total=0, free=disk["bytes"] - taken)

    monkeypatch.setattr("gpurun.remote.download.shutil.disk_usage", usage)
    return disk


def test_what_fits_comes_home_and_the_rest_once_there_is_room(world: World, room: dict[str, int]) -> None:
    """The disk has room for two of three files: the two most valuable come home now, the third once there is room."""
    at_that_time = list[set[str]]()

    def make_room() -> None:
        at_that_time.append(world.at_home)
        room["bytes"] = 1 << 40

    after(world, 150.0, make_room)
    assert world.drive() is ExitCode.DONE
    assert at_that_time == [{Path(LATEST).name, Path(OPTIMIZER).name}], "the most valuable"
    assert len(world.at_home) == 3
    (incident,) = world.all_of(Event.INCIDENT)
    assert incident["code"] == "collect.disk_full"
    assert Path(BEST).name in incident["message"]
    assert (world.cloud.boxes[0].died_s or 0) < 250
    assert kept(world)


def test_what_fits_is_recorded_though_the_rest_never_has_room(world: World, room: dict[str, int]) -> None:
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert (world.cloud.boxes[0].died_s or 0) <= LEASE.total_s
    assert [file["name"] for file in collected(world)["files"]] == [LATEST, OPTIMIZER]
    assert collected(world)["missing"] == [BEST]
    assert receipt_of(world)["checkpoint"]["latest"] == 30
    assert "no room" in world.state.failure.message
    assert ended(world)


def test_a_file_that_has_no_room_keeps_no_other_waiting(world: World) -> None:
    world.far.broken[f"get {LATEST}"] = FULL
    after(world, 150.0, world.far.broken.clear)
    names = fetched(world)
    assert world.drive() is ExitCode.DONE
    assert names == [LATEST, OPTIMIZER, BEST]
    assert len(world.at_home) == 3
    assert kept(world)


def test_a_disk_that_takes_no_new_folder_is_waited_for_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = os.mkdir

    def full(path: Any, *rest: Any, **more: Any) -> None:
        if "artifacts" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        mkdir(path, *rest, **more)

    monkeypatch.setattr(os, "mkdir", full)
    after(world, 250.0, lambda: monkeypatch.setattr(os, "mkdir", mkdir))
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    assert kept(world)


def test_a_disk_unmounted_at_the_end_of_training_is_waited_for(world: World) -> None:
    """`artifacts` links to a disk that is unmounted when training ends: gpurun keeps the machine until it can store."""
    disk = world.home.root / "disk"
    world.folder.artifacts.symlink_to(disk)
    after(world, 250.0, disk.mkdir)
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    (first, *_) = world.all_of(Event.INCIDENT)
    assert first["code"] == "collect.cannot_store"
    assert "automatically" in first["message"]
    assert kept(world)


def test_a_folder_that_sudo_has_left_to_root_is_waited_for_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sudo gpurun collect` has made a folder that only root can read: gpurun must wait until it is readable."""
    old = ManifestFile(name="checkpoints/000010.model.safetensors", bytes=3, sha256="0" * 64, kind="weights", step=10)
    Inventory(world.folder).note(step=10, files=(old.name,), whole=(old,))
    stat = os.stat

    def shut(path: Any, *rest: Any, **more: Any) -> os.stat_result:
        if "artifacts/checkpoints" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *rest, **more)

    monkeypatch.setattr(os, "stat", shut)
    after(world, 250.0, lambda: monkeypatch.setattr(os, "stat", stat))
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    assert kept(world)


@pytest.mark.parametrize("copied", ["run.log", "events.jsonl"])
def test_an_unreachable_copy_ends_no_training_nor_is_made_twice(
    world: World, monkeypatch: pytest.MonkeyPatch, copied: str
) -> None:
    """The home's file server restarts during training: the run must survive, and copy each line of the log once."""
    stat = os.stat
    after(world, 30.0, lambda: monkeypatch.setattr(os, "stat", stale(copied)))
    after(world, 50.0, lambda: monkeypatch.setattr(os, "stat", stat))
    assert world.drive() is ExitCode.DONE
    assert len(world.folder.log.read_bytes().splitlines()) == 1
    (first,) = world.all_of(Event.INCIDENT)
    assert first["code"] == "watch.disk_full"
    assert copied in first["message"]
    assert kept(world)


def test_a_restarted_supervisor_needs_no_look_at_the_copies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """events.jsonl may show a machine that the journal has lost.

    A run whose journal still has its machine must resume even if that file cannot be read.
    """
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    stat = os.stat
    monkeypatch.setattr(os, "stat", stale("events.jsonl"))
    assert look_at_run(world.home, world.folder.name).state.may_be_billing
    after(world, world.clock.monotonic() + 50.0, lambda: monkeypatch.setattr(os, "stat", stat))
    assert world.drive() is ExitCode.DONE
    assert kept(world)


def test_events_that_stay_out_of_reach_leave_the_time_to_collect(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def shut(path: Path) -> Iterator[dict[str, Any]]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(watch_training, "events_of", shut)
    world.drive()
    assert len(world.at_home) == 3
    assert kept(world)


def test_an_early_file_that_became_unreadable_is_fetched_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.folder.artifacts / "checkpoints").mkdir(parents=True)
    (world.folder.artifacts / LATEST).write_bytes(WEIGHTS[1][1])
    digest = hashlib.file_digest

    # The file is held open so that no later file gets its inode.
    with (world.folder.artifacts / LATEST).open("rb") as spoilt:

        def unreadable(file: Any, kind: str) -> Any:
            if os.path.sameopenfile(file.fileno(), spoilt.fileno()):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return digest(file, kind)

        monkeypatch.setattr(hashlib, "file_digest", unreadable)
        assert world.drive() is ExitCode.DONE
        assert len(world.at_home) == 3
        assert kept(world)


def test_nobody_waits_for_room_for_what_a_dead_machine_had(world: World, room: dict[str, int]) -> None:
    def die() -> None:
        world.cloud.boxes[0].died_s = world.cloud.now

    after(world, 150.0, die)
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert world.clock.monotonic() < 250
    assert collected(world)["missing"] == [BEST]
    assert kept(world)


def test_more_than_any_disk_takes_is_refused_with_the_list(world: World) -> None:
    """No disk has room for 2^60 bytes: gpurun must refuse a list that announces so many, and not wait for room."""
    limits: list[int] = []
    manifest = world.far.manifest
    world.far.manifest = lambda most: limits.append(most) or manifest(most)  # type: ignore
    assert world.drive() is ExitCode.DONE
    assert set(limits) == {MOST_ANNOUNCED_BYTES}
    assert MOST_ANNOUNCED_BYTES < 2**60


def test_a_file_too_large_for_the_model_stays_and_the_rest_comes(world: World) -> None:
    """A hostile machine lists a sample text of 300 MB for a small model: gpurun must download the other files only."""
    large = {"name": "samples/000040-0.txt", "bytes": 300 << 20, "sha256": "0" * 64, "kind": "sample", "step": 40}
    names, manifest = fetched(world), world.far.manifest

    def manifest_with_large_file(most: int) -> Manifest:
        listed = manifest(most)
        return listed.model_copy(update={"files": (*listed.files, ManifestFile(**large))})

    world.far.manifest = manifest_with_large_file  # type: ignore[method-assign]
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert names == [LATEST, OPTIMIZER, BEST]
    assert collected(world)["missing"] == [large["name"]]
    assert kept(world)


# A file that another process has locked


@contextmanager
def held(world: World, content: bytes) -> Iterator[Path]:
    """Lock the partial download of these bytes, as `gpurun collect` in another process does, and yield its path."""
    place = world.folder.artifacts / PARTIAL_FOLDER / hashlib.sha256(content).hexdigest()
    place.parent.mkdir(parents=True)
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield place
    finally:
        os.close(descriptor)


def test_a_file_a_stopped_collect_holds_comes_last_despite_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `gpurun collect` stopped with ^Z keeps its file locked.

    The run must fetch that file last, without waiting for it.
    """
    monkeypatch.setattr(resumable_file, "WAIT_S", 0.01)
    names = fetched(world)
    with held(world, WEIGHTS[1][1]) as place:
        place.write_bytes(b"what it had by then")
        assert world.drive() is ExitCode.DONE
        assert place.read_bytes() == b"what it had by then"
    assert names == [OPTIMIZER, BEST, LATEST]
    assert (world.folder.artifacts / LATEST).read_bytes() == WEIGHTS[1][1]
    assert (world.cloud.boxes[0].died_s or 0) < 300, "it is not waited for until the lease is over"
    assert kept(world)


def test_a_file_that_another_process_is_fetching_is_left_to_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_file, "WAIT_S", 0.01)
    names, sleep = fetched(world), world.clock.sleep
    with held(world, WEIGHTS[1][1]) as place:

        def goes_on(seconds: float) -> None:
            sleep(seconds)
            if world.clock.monotonic() < 100 + 3 * STUCK_S:
                with resumable_file.locate_notes(place).open("ab") as notes:
                    notes.write(b"0 1\n")
            elif place.exists():
                place.write_bytes(WEIGHTS[1][1])
                place.rename(world.folder.artifacts / LATEST)

        world.clock.sleep = goes_on  # type: ignore[method-assign]
        assert world.drive() is ExitCode.DONE
    assert names == [OPTIMIZER, BEST], "nothing is fetched twice"
    assert len(world.at_home) == 3
    assert kept(world)
