"""Tests that a power cut cannot undo a write: a downloaded file, the agent's state, the removal of a key.

Each test checks in which order one write is synced to the disk: the file, then its name, then its folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.paths import Home
from gpurun.lifecycle.artifacts.on_demand import copy_out
from gpurun.providers.ssh import SshProvider
from gpurun.remote.agent import finish_upload, system
from gpurun.remote.agent.runner.published import PublishedOutputs
from gpurun.remote.agent.runner.sweep import RunningSweep
from gpurun.remote.download import WantedFile, fetch
from gpurun.remote.key_pairs import forget_client_key, make_keys
from gpurun.remote.messages import ManifestFile
from gpurun.remote.ssh.program import put_argv
from tests.simulation.syncs import needs_proc, story  # noqa: F401  # `story` is a fixture

CONTENT = b"weights" * 100
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@needs_proc
def test_a_file_that_came_home_is_on_disk_before_it_has_its_name(story: list[str], tmp_path: Path) -> None:  # noqa: F811
    fetch(WantedFile("checkpoints/1.bin", len(CONTENT), SHA256), tmp_path, lambda at, most, take: take(CONTENT[at:]))
    assert story == ["file", "name", "folder"]


@needs_proc
def test_a_copy_elsewhere_is_on_disk_before_it_has_its_name(story: list[str], tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "1.bin").write_bytes(CONTENT)
    file = ManifestFile(name="1.bin", bytes=len(CONTENT), sha256=SHA256, kind="weights", step=1)
    copy_out(tmp_path / "home", [file], tmp_path / "elsewhere")
    assert story == ["file", "name", "folder"]


@needs_proc
def test_the_agents_state_is_on_disk_before_it_has_its_name(story: list[str], tmp_path: Path) -> None:  # noqa: F811
    system.write(str(tmp_path / "job.json"), {"v": 1})
    assert story == ["file", "name", "folder"]


@needs_proc
def test_a_heartbeat_costs_no_sync(story: list[str], tmp_path: Path) -> None:  # noqa: F811
    system.write(str(tmp_path / "status.json"), {"v": 1}, durable=False)
    assert story == ["name"]


@needs_proc
def test_the_shipped_list_is_on_disk_before_it_takes_its_place(story: list[str], tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / ".incoming"
    (folder / "files" / "data").mkdir(parents=True)
    (folder / "files" / "data" / "a.bin").write_bytes(CONTENT)
    (tmp_path / "agent").mkdir()
    finish_upload.put_in_place(str(tmp_path), str(folder), [])
    assert story == ["file", "name", "folder", "folder"]
    assert (tmp_path / "data" / "a.bin").read_bytes() == CONTENT


@needs_proc
def test_shipped_files_are_synced_before_they_count_after_a_boot(
    story: list[str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, boots = {"manifest_sha256": SHA256}, ["one"]
    monkeypatch.setattr(finish_upload, "sync_filesystem", lambda folder: story.append("all that was written"))
    monkeypatch.setattr(finish_upload, "boot_id", lambda: boots[-1])
    (tmp_path / "agent").mkdir()
    finish_upload.note_shipped(str(tmp_path), record)
    assert story == ["file", "name", "folder"], "the trainer waits for no disk"
    assert finish_upload.read_upload_record(str(tmp_path)) == record
    boots.append("two")
    assert finish_upload.read_upload_record(str(tmp_path)) == {}, "who knows what a power cut left of it"
    boots.append("one")
    story.clear()
    finish_upload.make_durable(str(tmp_path))
    assert story == ["all that was written", "file", "name", "folder"]
    boots.append("two")
    assert finish_upload.read_upload_record(str(tmp_path)) == record


def test_a_pack_swapped_during_its_sync_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent").mkdir()
    finish_upload.note_shipped(str(tmp_path), {"manifest_sha256": SHA256})
    another = {"manifest_sha256": "0" * 64}
    monkeypatch.setattr(finish_upload, "sync_filesystem", lambda folder: finish_upload.note_shipped(folder, another))
    finish_upload.make_durable(str(tmp_path))
    assert "boot" in system.read(str(tmp_path), "agent", "shipped.json")


def test_what_is_being_replaced_just_then_is_not_called_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finish_upload, "LOCK_S", 0)
    (tmp_path / "agent").mkdir()
    finish_upload.note_shipped(str(tmp_path), {"manifest_sha256": SHA256})
    held = system.locked(str(tmp_path), "unpack.lock", 0)
    finish_upload.make_durable(str(tmp_path))
    os.close(held)
    assert "boot" in system.read(str(tmp_path), "agent", "shipped.json")


def test_where_no_process_is_to_be_had_it_is_synced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    (tmp_path / "agent").mkdir()
    finish_upload.note_shipped(str(tmp_path), {"manifest_sha256": SHA256})
    monkeypatch.setattr(os, "fork", no_fork)
    finish_upload.sync_behind(str(tmp_path))
    assert "boot" not in system.read(str(tmp_path), "agent", "shipped.json")


def test_where_boots_have_no_names_it_is_synced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    (tmp_path / "agent").mkdir()
    monkeypatch.setattr(finish_upload, "boot_id", lambda: "")
    monkeypatch.setattr(finish_upload, "sync_filesystem", synced.append)
    finish_upload.note_shipped(str(tmp_path), {"manifest_sha256": SHA256})
    assert synced == [str(tmp_path)]


def test_all_file_systems_are_synced_where_one_alone_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    monkeypatch.setattr(os, "sync", lambda: synced.append("all"))
    system.sync_filesystem(str(tmp_path))
    assert synced == ["all"]


@needs_proc
def test_a_login_key_that_was_forgotten_does_not_come_back(story: list[str], tmp_path: Path) -> None:  # noqa: F811
    make_keys(tmp_path)
    story.clear()
    forget_client_key(tmp_path)
    assert story == ["folder"]
    assert not (tmp_path / "client").exists()


@needs_proc
def test_a_box_that_was_given_back_is_free_after_a_power_cut(story: list[str], tmp_path: Path) -> None:  # noqa: F811
    home = Home(tmp_path).prepare()
    provider = SshProvider(home, VirtualClock(), None)  # type: ignore[arg-type]
    folder = provider._folder
    folder.mkdir(parents=True, exist_ok=True)
    story.clear()
    provider.destroy("gr-fox-41-00000001")
    assert story == ["folder"]


@needs_proc
def test_a_pack_is_on_disk_before_it_has_its_name(
    story: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    from gpurun.cli.commands.pack import _write_pack
    from gpurun.remote.archive import Pack, survey

    (tmp_path / "a.bin").write_bytes(CONTENT)
    _write_pack(Pack(survey({"data": tmp_path / "a.bin"})), str(tmp_path / "out.tar.zst"))
    assert story == ["file", "name"]
    assert (tmp_path / "out.tar.zst").stat().st_size


# Upload of a file over SSH --------------------------------------------------------------------------------------------


def put(path: Path, said_bytes: int, content: bytes, **more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        put_argv(str(path), said_bytes), input=content, capture_output=True, env={**os.environ, **more}
    )


def test_a_file_put_over_ssh_is_synced_before_it_takes_its_place(tmp_path: Path) -> None:
    """A `dd` that precedes the real one in PATH records its arguments."""
    real, tools = shutil.which("dd"), tmp_path / "tools"
    tools.mkdir()
    (tools / "dd").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexec {real} "$@"\n')
    (tools / "dd").chmod(0o755)
    done = put(tmp_path / "agent.pyz", len(CONTENT), CONTENT, PATH=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert "conv=fsync" in (tmp_path / "asked").read_text().split()
    assert (tmp_path / "agent.pyz").read_bytes() == CONTENT


@pytest.mark.parametrize("said", [len(CONTENT) - 1, len(CONTENT) + 1, 0])
def test_a_file_of_another_length_than_was_told_takes_no_place(tmp_path: Path, said: int) -> None:
    (tmp_path / "job.json").write_bytes(b"old")
    assert put(tmp_path / "job.json", said, CONTENT).returncode != 0
    assert (tmp_path / "job.json").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"], "and nothing half is left beside it"


@needs_proc
def test_the_list_of_outputs_is_on_disk_before_it_has_its_name(story: list[str], tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "work").mkdir()
    order = {"outputs": ("*.bin",), "checkpoints": ""}
    outputs = PublishedOutputs(str(tmp_path / "work"), str(tmp_path / "out"), order, lambda kind, **more: None)
    (tmp_path / "work" / "a.bin").write_bytes(CONTENT)
    story.clear()
    outputs.look(1, is_last=True)
    assert story == ["name", "file", "name"], "the output, then the list"


@needs_proc
def test_the_table_of_trials_is_on_disk_before_it_has_its_name(story: list[str], tmp_path: Path) -> None:  # noqa: F811
    order: dict[str, Any] = {
        "space": {"lr": ["1"]}, "sampler": "grid", "prune": "", "trials": 1, "keep": 1, "seed": 0, "jobs": 1,
        "cards": 0, "secrets": [], "earlier": [],
    }  # fmt: skip
    sweep = RunningSweep(order, str(tmp_path / "bundle"))
    story.clear()
    sweep.write()
    assert story == ["file", "name"]
