"""Tests that downloaded files are in the receipt and usable even if the collect step did not record them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gpurun.cli.commands.collect import collect
from gpurun.cli.session import Session
from gpurun.core.clock import SystemClock
from gpurun.core.errors import CollectFailed, ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home, RunFolder
from gpurun.core.stop_request import ask_to_stop
from gpurun.lifecycle.artifacts.downloader import BackgroundDownload
from gpurun.lifecycle.artifacts.inventory import Inventory
from gpurun.lifecycle.artifacts.on_demand import Salvaged
from gpurun.lifecycle.steps import collect_bucket
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile
from tests.lifecycle.bringing import collected
from tests.lifecycle.early import FREE, Instance
from tests.lifecycle.faults import kept, receipt_of
from tests.lifecycle.scripted_cloud import LEASE, SPARE, WEIGHTS, World
from tests.tensor_file import as_tensors

OLD = ("checkpoints/000015.model.safetensors", as_tensors(b"\x0f" * 4926), 15)
ALL = [name for name, _, _ in WEIGHTS]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def put(folder: RunFolder, *files: tuple[str, bytes, int]) -> None:
    """Write these files into the run's artifacts."""
    for name, content, _ in files:
        (folder.artifacts / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.artifacts / name).write_bytes(content)


def listed(name: str, content: bytes, step: int) -> ManifestFile:
    digest = hashlib.sha256(content).hexdigest()
    return ManifestFile(name=name, bytes=len(content), sha256=digest, kind="weights", step=step)


def while_training(world: World, *files: tuple[str, bytes, int]) -> None:
    """Put these files at home and remember the machine's list, as the download during training does."""
    Inventory(world.folder).remember(world.far.manifest(MOST_ANNOUNCED_BYTES))
    put(world.folder, *files)


def until_the_lease_is_over(world: World) -> None:
    world.clock.sleep(LEASE.total_s - LEASE.destroy_s - world.clock.monotonic() + 1.0)


@pytest.mark.parametrize(("how", "code"), [("destroy", ExitCode.INTERRUPTED), ("closed lid", ExitCode.BUDGET_STOP)])
def test_files_home_before_a_destroy_are_in_the_receipt(world: World, how: str, code: ExitCode) -> None:
    """Files that came home before a `gpurun destroy`, or before the lid closed until after the lease, are recorded."""

    def act() -> None:
        if world.far.polls == 3:
            while_training(world, *WEIGHTS[:2])
            if how == "destroy":
                ask_to_stop(world.folder, "destroy", by="user", reason="enough")
            else:
                until_the_lease_is_over(world)

    world.far.during = act
    assert world.drive() is code
    assert world.all_of(Event.COLLECT_OBSERVED) == []
    checkpoint = receipt_of(world)["checkpoint"]
    assert [file["name"] for file in checkpoint["files"]] == ALL[:2]
    assert checkpoint["missing"] == [ALL[2], SPARE[0]]
    brought = collect(Session(home=world.home, quiet=True), world.folder.name, only="best")
    assert [file["name"] for file in brought.data["here"]] == ALL[:1]
    assert brought.data["lost"] == [ALL[2], SPARE[0]]
    assert kept(world)


def test_of_a_run_of_which_nothing_came_home_nothing_is_said(world: World) -> None:
    def act() -> None:
        if world.far.polls == 3:
            while_training(world)
            ask_to_stop(world.folder, "destroy", by="user", reason="enough")

    world.far.during = act
    world.drive()
    assert world.all_of(Event.SALVAGE_OBSERVED) == []
    assert kept(world)


def test_what_a_collect_brought_before_a_crash_is_in_the_receipt(world: World) -> None:
    """The supervisor is killed during the download and restarted after the lease.

    The files at home must be recorded.
    """
    world.cloud.killing = f"before far.get {ALL[0]}"
    assert world.drive() == "killed"
    until_the_lease_is_over(world)
    assert world.drive() is ExitCode.BUDGET_STOP
    assert {file["name"] for file in receipt_of(world)["checkpoint"]["files"]} == set(ALL[1:])
    assert kept(world)


def test_an_unreadable_list_keeps_no_run_from_its_receipt(world: World) -> None:
    (world.folder.path / "inventory.json").mkdir()
    ask_to_stop(world.folder, "destroy", by="user", reason="enough")
    world.drive()
    assert kept(world)


# A checkpoint that two later ones have replaced on the machine


def test_a_whole_checkpoint_is_remembered_when_no_list_has_it(tmp_path: Path, folder: RunFolder) -> None:
    instance = Instance(tmp_path / "instance")
    first = instance.save(10)
    BackgroundDownload(instance.far, folder, FREE, SystemClock()).bring(instance.far)
    instance.save(30, 40)
    Inventory(folder).remember(instance.far.manifest(MOST_ANNOUNCED_BYTES))
    known = Inventory(folder).remembered()
    assert known is not None
    assert set(first) < {file.name for file in known.files}
    assert known.latest == 40
    (folder.artifacts / first[0]).unlink()
    known = Inventory(folder).remembered()
    assert known is not None
    assert first[0] not in {file.name for file in known.files}, "a user who wants the room removes it"


@pytest.mark.parametrize("how", ["the machine vanishes", "nothing arrives whole"])
def test_the_last_whole_one_is_recorded_where_later_are_lost(world: World, how: str) -> None:
    """Step 15 is at home; steps 25 and 30 are lost. The receipt must name step 15, and the others as missing."""

    def act() -> None:
        if world.far.polls == 3:
            while_training(world, OLD)
            Inventory(world.folder).note(step=15, files=(OLD[0],), whole=(listed(*OLD),))
            if how == "the machine vanishes":
                world.cloud.boxes[0].died_s = world.cloud.now

    def damaged(name: str, size_bytes: int, sha256: str, into: Path, **more: object) -> Path:
        if (into / name).exists():
            return into / name
        raise CollectFailed(
            "collect.wrong_digest", f"{name} was downloaded 4 times, always with another digest.", hint="?"
        )

    world.far.during = act
    if how == "nothing arrives whole":
        world.far.fetch = damaged  # type: ignore[method-assign,assignment]
    assert isinstance(world.drive(), ExitCode)
    assert [file["name"] for file in collected(world)["files"]] == [OLD[0]]
    assert set(collected(world)["missing"]) == {*ALL, SPARE[0]}
    assert kept(world)


# A bucket


def test_early_files_count_beside_what_the_bucket_has(folder: RunFolder) -> None:
    """Files that are not in the bucket's newer list were replaced by newer ones, so they must not count as missing."""
    put(folder, WEIGHTS[0])
    files = [listed(*WEIGHTS[0]), listed(*WEIGHTS[1]), listed(*SPARE)]
    Inventory(folder).remember(Manifest(latest=30, files=tuple(files)))
    nothing = collect_bucket._at_home(Salvaged(Manifest(), (), {}, (), 0), Inventory(folder))
    assert [file["name"] for file in nothing["files"]] == [WEIGHTS[0][0]]  # type: ignore[attr-defined]
    assert nothing["missing"] == sorted([WEIGHTS[1][0], SPARE[0]])
    newer = listed("checkpoints/000040.model.safetensors", b"w", 40)
    found = collect_bucket._at_home(
        Salvaged(Manifest(latest=40, files=(newer,)), (newer,), {}, (), 3), Inventory(folder)
    )
    assert [file["name"] for file in found["files"]] == [WEIGHTS[0][0], newer.name]  # type: ignore[attr-defined]
    assert found["missing"] == []
