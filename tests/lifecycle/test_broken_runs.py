"""Tests of runs whose journal, disk or PyTorch is broken: no file is lost, and the user learns what to do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.errors import SetupError
from gpurun.core.machine_token import make_token
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Order
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.ledger.journal import read_journal
from gpurun.ledger.runs import look_at_run
from gpurun.planning import trainer_proposal as planning
from gpurun.providers.local import LocalProvider
from tests.command_line import gpurun
from tests.lifecycle.scripted_cloud import World
from tests.lifecycle.tiny_runs import drive, events_of, make_run, start


def test_a_recorded_repair_of_a_torn_last_line_lets_it_continue(own: Home) -> None:
    folder = make_run(own)
    assert drive(own, GPURUN_CRASH_AT="after ship.intended").returncode == -9
    with folder.journal.open("ab") as journal:
        journal.write(b'{"boot_id":"af57')
    assert drive(own).returncode == 0
    assert "journal.repaired" in events_of(folder)
    assert read_journal(folder.journal).damage is None


def test_damage_in_the_middle_makes_it_read_only_except_destroy(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(own)
    assert drive(own, GPURUN_CRASH_AT="after train.intended").returncode == -9
    lines = folder.journal.read_bytes().splitlines(keepends=True)
    folder.journal.write_bytes(b"".join([lines[0], lines[1].replace(b"1", b"7"), *lines[2:]]))
    monkeypatch.setenv("GPURUN_HOME", str(own.root))
    before = folder.journal.read_bytes()
    resumed = gpurun("resume", "fox-41")
    assert resumed.returncode == 9, "nobody can read whether its machine lives"
    assert "journal.damaged" in resumed.stderr
    assert drive(own).returncode == 9, "not even a supervisor that was started by hand spends on it"
    assert LocalProvider(own, SystemClock()).find(None), "the instance is still there"
    assert gpurun("destroy", "fox-41", "--yes").returncode == 0
    assert LocalProvider(own, SystemClock()).find(None) == []
    assert folder.journal.read_bytes() == before, "a damaged journal is evidence and stays as it is"


@pytest.mark.parametrize("number", range(8))
def test_damage_anywhere_in_a_journal_means_it_may_be_billing(
    own: Home, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    world = World(own)
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    lines = world.folder.journal.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(b'"event"', b'"evint"')
    world.folder.journal.write_bytes(b"".join(lines))
    monkeypatch.setenv("GPURUN_HOME", str(own.root))
    for verb in (["ps"], ["audit"], ["resume", "fox-41"], ["stop", "fox-41"]):
        assert gpurun(*verb).returncode == 9, verb


def test_an_instance_without_its_journal_is_ended_by_its_tag(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, provider = SystemClock(), LocalProvider(own, SystemClock())
    offer = provider.offers(GpuNeed(count=0, name="cpu"), ())[0]
    order = Order(
        run="lost-1",
        token=make_token(own.id, clock.wall() + 600, "lost-1"),
        attempt=1,
        offer=offer,
        deadline_wall=clock.wall() + 600,
    )
    provider.create(order)
    monkeypatch.setenv("GPURUN_HOME", str(own.root))
    within = gpurun("reap", "--json")
    assert json.loads(within.stdout)["data"]["found"][0]["fate"] == "within lease", "not past its deadline: left alone"
    assert gpurun("reap", "--destroy", "--older-than", "1h").returncode == 0
    assert provider.find(None), "younger than an hour: left alone"
    ended = gpurun("reap", "--destroy", "--json")
    assert json.loads(ended.stdout)["data"]["found"][0]["fate"] == "destroyed"
    assert provider.find(None) == []


def test_a_dry_run_without_torch_says_which_extra(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "find_spec", lambda name: None)
    with pytest.raises(SetupError) as raised:
        planning._require_packages(resolve(load_recipe("mini-gpt"), "rehearsal"))
    assert raised.value.code == "torch.missing"
    assert "[local]" in raised.value.hint


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Home]:
    """Yield a home on a disk of four megabytes; skip the test if that cannot be mounted, which needs root."""
    root = tmp_path / "disk"
    root.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", root]).returncode:
        pytest.skip("making a small disk needs root and mount")
    try:
        yield Home(root)
    finally:
        home = Home(root)
        for instance in LocalProvider(home, SystemClock()).find(None):
            LocalProvider(home, SystemClock()).destroy(instance.id)
        subprocess.run(["umount", "-l", root], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("free_kb", [0, 8, 16, 24, 32, 48, 64, 80, 96, 104, 112, 120, 128, 136, 144, 160])
def test_a_disk_that_fills_up_anywhere_loses_nothing(small_disk: Home, free_kb: int) -> None:
    folder = make_run(small_disk)
    ballast = small_disk.root / "ballast"
    disk = os.statvfs(small_disk.root)
    size = disk.f_bavail * disk.f_frsize - free_kb * 1024
    ballast.write_bytes(b"\0" * size)
    first = start(small_disk)
    with contextlib.suppress(subprocess.TimeoutExpired):
        first.wait(4)  # A process that is still alive waits for room on the disk and keeps its instance.
    ballast.unlink()
    _, words = first.communicate(timeout=60)
    state = look_at_run(small_disk, "fox-41").state
    if first.returncode:
        assert words or state.failure or state.outcome == "failed", "a full disk is reported, never passed over"
    second = drive(small_disk)
    sight = look_at_run(small_disk, "fox-41")
    assert not sight.unfinished, second.stderr
    assert sight.damage is None
    assert LocalProvider(small_disk, SystemClock()).find(None) == []
    if sight.state.outcome == "done":
        assert sight.state.exit_code == 0
        assert len(list((folder.artifacts / "checkpoints").iterdir())) == 3, "what was trained came home"
