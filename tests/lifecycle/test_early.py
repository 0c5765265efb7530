"""Tests of the download during training: its failures must harm neither the training nor the other files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.core.clock import SystemClock, VirtualClock
from gpurun.core.errors import UsageError
from gpurun.core.paths import RunFolder
from gpurun.core.trainer_events import EventLines
from gpurun.lifecycle.artifacts import downloader
from gpurun.lifecycle.artifacts.downloader import BackgroundDownload
from gpurun.lifecycle.artifacts.inventory import EgressBudget, Inventory
from gpurun.lifecycle.artifacts.on_demand import bring_now
from gpurun.remote.client import FarSide
from gpurun.remote.download import PARTIAL_FOLDER
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, Manifest
from gpurun.remote.resumable_file import locate_notes
from tests.lifecycle.early import FREE, Instance, at_home, until
from tests.refusals import refusal


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    before = threading.active_count()
    (tmp_path / "run").mkdir()
    yield RunFolder(tmp_path / "run")
    assert threading.active_count() <= before, "no thread outlives the watch"


LINE = b'{"kind": "checkpoint", "step": 1}\n'
TOLD = EventLines().take(LINE)


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path / "instance")


def newest(folder: RunFolder) -> Any:
    path = folder.path / "inventory.json"
    return json.loads(path.read_bytes())["step"] if path.exists() else None


def test_a_checkpoint_comes_home_in_training_and_is_replaced(instance: Instance, folder: RunFolder) -> None:
    with BackgroundDownload(instance.far, folder, FREE, SystemClock()) as early:
        early.look([])
        first = instance.save(10)
        early.look(TOLD)
        until(lambda: newest(folder) == 10)
        assert at_home(folder) == set(first)
        second = instance.save(20)
        early.look(TOLD)
        until(lambda: newest(folder) == 20 and at_home(folder) == set(second))


def test_an_earlier_supervisors_copies_are_let_go_and_no_others(instance: Instance, folder: RunFolder) -> None:
    instance.save(10)
    BackgroundDownload(instance.far, folder, FREE, SystemClock()).bring(instance.far)
    (folder.artifacts / "mine.txt").write_bytes(b"of the user")
    second = instance.save(20)
    BackgroundDownload(instance.far, folder, FREE, SystemClock()).bring(instance.far)
    assert at_home(folder) == {*second, "mine.txt"}


def test_an_older_checkpoint_stays_until_the_newer_is_here_whole(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = instance.save(10)
    BackgroundDownload(instance.far, folder, FREE, SystemClock()).bring(instance.far)
    instance.save(20)
    fetch = instance.far.fetch

    def breaks(name: str, *rest: Any, **more: Any) -> Path:
        if name.endswith("weights"):
            raise MachineLost("cut")
        return fetch(name, *rest, **more)

    monkeypatch.setattr(instance.far, "fetch", breaks)
    with pytest.raises(MachineLost):
        BackgroundDownload(instance.far, folder, FREE, SystemClock()).bring(instance.far)
    assert set(first) <= at_home(folder)
    assert newest(folder) == 10


def test_what_was_replaced_makes_room_before_the_next_one_comes(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk holds two and a half checkpoints: a replaced one must be deleted before the next is downloaded."""
    size_bytes = (instance.out / instance.save(10)[0]).stat().st_size

    def usage(_: object) -> SimpleNamespace:
        taken = sum(path.stat().st_size for path in folder.artifacts.rglob("*") if path.is_file())
        return SimpleNamespace(total=0, free=2 * size_bytes + size_bytes // 2 - taken)

    monkeypatch.setattr("gpurun.remote.download.shutil.disk_usage", usage)
    for steps in ((10,), (10, 20), (20, 30), (30, 40)):
        names = instance.save(*steps)
        BackgroundDownload(instance.far, folder, FREE, SystemClock()).bring(instance.far)
        assert at_home(folder) == set(names)


def test_a_partial_copy_of_a_replaced_file_gives_back_its_room(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    partials = folder.artifacts / PARTIAL_FOLDER
    partials.mkdir(parents=True)

    def begun(step: int) -> Path:
        place = partials / hashlib.sha256(b"w%d" % step * 50_000).hexdigest()
        place.write_bytes(b"half of it")
        locate_notes(place).write_bytes(b"0 10 0\n")
        return place

    replaced, held, wanted = begun(10), begun(20), begun(30)
    instance.save(30, 40)
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Inventory(folder).remember(instance.far.manifest(MOST_ANNOUNCED_BYTES))
    assert not replaced.exists()
    assert not locate_notes(replaced).exists()
    assert held.exists(), "somebody has it open"
    assert wanted.exists(), "it is gone on with"


def test_a_restarted_supervisor_brings_what_was_still_to_come(instance: Instance, folder: RunFolder) -> None:
    """A restarted supervisor must fetch a checkpoint announced before its start.

    The next announcement may be an hour away.
    """
    folder.events.write_bytes(LINE)
    instance.save(10)
    with BackgroundDownload(instance.far, folder, FREE, SystemClock()):
        until(lambda: newest(folder) == 10)


def test_unreadable_events_do_not_stop_the_watch(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If events.jsonl cannot be read because the home's file server restarts, checkpoints must still come home."""
    stat = os.stat

    def stale(path: Any, *rest: Any, **more: Any) -> os.stat_result:
        if str(path) == str(folder.events):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, *rest, **more)

    monkeypatch.setattr(os, "stat", stale)
    instance.save(10)
    with BackgroundDownload(instance.far, folder, FREE, SystemClock()) as early:
        early.look(TOLD)
        until(lambda: newest(folder) == 10)


def test_without_a_machine_elsewhere_it_does_nothing(folder: RunFolder) -> None:
    with BackgroundDownload(None, folder, FREE, SystemClock()) as early:
        early.look(TOLD)
    assert not folder.artifacts.exists()


def test_the_watch_ends_without_waiting_for_a_fetch(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.save(10)
    begun = threading.Event()

    def slow(*_: Any, on_progress: Callable[[int], None], **__: Any) -> None:
        begun.set()
        while True:
            threading.Event().wait(0.02)
            on_progress(1)

    monkeypatch.setattr(FarSide, "fetch", slow)
    with BackgroundDownload(instance.far, folder, FREE, SystemClock()) as early:
        early.look(TOLD)
        assert begun.wait(10)
    assert newest(folder) is None


def test_a_checkpoint_that_is_not_complete_is_not_the_newest(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.save(10)
    (folder.artifacts / "checkpoints").mkdir(parents=True)
    (folder.artifacts / "checkpoints" / "000010.state").write_bytes(b"of an older content under the same name")
    fetch = instance.far.fetch

    def refuses(name: str, *rest: Any, **more: Any) -> Path:
        if name.endswith("state"):
            raise FarRefusal("no_such_file", "it has been replaced")
        return fetch(name, *rest, **more)

    monkeypatch.setattr(instance.far, "fetch", refuses)
    BackgroundDownload(instance.far, folder, FREE, SystemClock()).bring(instance.far)
    assert newest(folder) is None


def test_a_disk_that_refuses_is_reported_and_tried_again(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(downloader, "AGAIN_S", 0.05)
    real, refusals = Inventory.remember, iter([OSError(28, "No space left on device")] * 2)

    def full(inventory: Inventory, manifest: Manifest) -> None:
        for error in refusals:
            raise error
        real(inventory, manifest)

    monkeypatch.setattr(Inventory, "remember", full)
    instance.save(10)
    with BackgroundDownload(instance.far, folder, FREE, SystemClock()) as early:
        early.look(TOLD)
        until(lambda: newest(folder) == 10)
    assert "No space left" in caplog.text


def test_where_bytes_cost_only_paid_ones_come_home_spread_out(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, left_bytes, limit_bytes = instance.far.fetch, dict[str, int](), 900_000

    def counted(name: str, size_bytes: int, *rest: Any, **more: Any) -> Path:
        left_bytes[name] = size_bytes
        return fetch(name, size_bytes, *rest, **more)

    monkeypatch.setattr(instance.far, "fetch", counted)
    for step in range(1, 21):
        instance.save(*{max(1, step - 1), step}, best=1)
        for _ in range(2):  # A restarted supervisor must download nothing twice.
            BackgroundDownload(instance.far, folder, EgressBudget(folder, limit_bytes, 20), SystemClock()).bring(
                instance.far
            )
        assert sum(left_bytes.values()) <= limit_bytes * step / 20
    assert sum(left_bytes.values()) > limit_bytes / 2
    assert newest(folder) >= 15


def test_a_users_fetch_counts_and_is_refused_beyond_the_plan(instance: Instance, folder: RunFolder) -> None:
    allowance = EgressBudget(folder, 200_000, 20)
    instance.save(10)
    for _ in range(2):
        assert bring_now(instance.far, folder, "last", VirtualClock(), lambda *_: None, allowance).here
    instance.save(10, 20)
    with refusal(UsageError, "collect.over_plan", "200,000"):
        bring_now(instance.far, folder, "last", VirtualClock(), lambda *_: None, allowance)


def test_an_older_gpuruns_four_notes_are_read_and_become_one(instance: Instance, folder: RunFolder) -> None:
    names = instance.save(10)
    manifest = instance.far.manifest(MOST_ANNOUNCED_BYTES)
    (folder.path / "manifest.json").write_text(manifest.model_dump_json())
    whole = [file.as_json() for file in manifest.files]
    brought = {"step": 10, "files": names, "whole": whole, "bytes_per_s": 9.5}
    (folder.path / "newest.json").write_text(json.dumps(brought))
    (folder.path / "kept.json").write_text('["mine"]')
    (folder.path / "left.json").write_text('{"ab": 7}')
    before = Inventory(folder).memory
    assert Inventory(folder).remembered() == manifest
    assert (before.step, before.files, before.whole) == (10, tuple(names), manifest.files)
    assert (before.bytes_per_s, before.kept, before.left) == (9.5, ("mine",), {"ab": 7})
    Inventory(folder).keep(["another"])
    assert Inventory(folder).memory == before.model_copy(update={"kept": ("another", "mine")})


@pytest.mark.parametrize("name", ["inventory.json", "left.json"])
def test_a_damaged_list_of_what_has_left_counts_as_all_of_it(instance: Instance, folder: RunFolder, name: str) -> None:
    """If the list of bytes that have left the machine is damaged, all paid egress counts as used.

    The list is in inventory.json, or in left.json if an older gpurun has written it.
    """
    instance.save(10)
    (folder.path / name).write_bytes(b"\0\0")
    BackgroundDownload(instance.far, folder, EgressBudget(folder, 900_000, 20), SystemClock()).bring(instance.far)
    assert at_home(folder) == set()


def test_a_watch_that_leaves_a_fetch_leaves_no_connection_open(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloader, "JOIN_S", 0.05)
    instance.save(10)
    begun, go_on, closed = threading.Event(), threading.Event(), list[str]()

    def deaf(*_: Any, **__: Any) -> None:
        begun.set()
        assert go_on.wait(10)

    monkeypatch.setattr(FarSide, "fetch", deaf)
    monkeypatch.setattr(FarSide, "close", lambda self: closed.append(threading.current_thread().name))
    with BackgroundDownload(instance.far, folder, FREE, SystemClock()) as early:
        early.look(TOLD)
        assert begun.wait(10)
    before = len(closed)
    go_on.set()
    until(lambda: len(closed) > before)
    assert closed[-1] != threading.main_thread().name
