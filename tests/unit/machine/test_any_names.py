"""Tests that a command's files come home unchanged over a real sshd, whatever their names and their number."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Place
from hypothesis import HealthCheck, given, settings

from gpurun.core.artifact_names import path_of
from gpurun.core.clock import SystemClock
from gpurun.core.paths import RunFolder
from gpurun.lifecycle.artifacts.downloader import Downloader
from gpurun.lifecycle.artifacts.inventory import Inventory, due_files
from gpurun.lifecycle.artifacts.on_demand import Brief
from gpurun.remote import small_files
from gpurun.remote.agent.runner.published import PublishedOutputs
from gpurun.remote.client import FarSide
from gpurun.remote.messages import ManifestFile
from tests.any_names import SETS, below, make
from tests.emulators import sshd

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())


class Command:
    """A command's folder on a box, and the home to which its outputs are downloaded."""

    def __init__(self, place: Place, home: Path) -> None:
        self.place, self.folder = place, RunFolder(home / "runs" / "fox-41")
        self.work, self.out = place.folder / "bundle" / "work", place.folder / "out"
        self.proxy = place.proxy()
        self.far = FarSide(place.machine(self.proxy.port), python=sys.executable)
        self.far.install_agent()

    def clear(self) -> None:
        for folder in (self.work, self.out, self.folder.path):
            shutil.rmtree(folder, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.folder.artifacts.mkdir(parents=True)
        order = {"outputs": ["**"], "checkpoints": ""}
        self.outputs = PublishedOutputs(str(self.work), str(self.out), order, lambda *_, **__: None)

    def brought(self) -> Downloader:
        manifest = self.far.manifest(1 << 40)
        inventory = Inventory(self.folder)
        inventory.remember(manifest)
        downloads = Downloader(self.far, inventory, Brief(SystemClock()), SystemClock())
        downloads.bring(due_files(manifest))
        return downloads


@pytest.fixture
def command(place: Place, tmp_path: Path) -> Command:
    return Command(place, tmp_path / "home")


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(files=SETS)
def test_any_set_of_names_comes_home_byte_for_byte(command: Command, files: dict[bytes, bytes]) -> None:
    command.clear()
    make(command.work, files)
    command.outputs.look(0, is_last=True)
    downloads = command.brought()
    assert (command.outputs.unpublished, downloads.missing) == ([], {})
    assert below(command.folder.artifacts / "outputs") == files


def test_many_small_files_take_few_calls_and_a_cut_loses_none(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_files, "MOST_BYTES", 1 << 20)
    command.clear()
    files = {b"frames/%d/img %06d.png" % (number % 7, number): b"%d" % number * 200 for number in range(3000)}
    make(command.work, files)
    command.outputs.look(0, is_last=True)
    calls, real, put = [], FarSide.gather, Inventory.put

    def counted(self: FarSide, files: Any, take: Any) -> Any:
        calls.append(len(files))
        return real(self, files, take)

    def cut_once(self: Inventory, file: ManifestFile, content: bytes) -> bool:
        if len(calls) == 2 and not command.proxy.cuts:
            command.proxy.cut()
        return put(self, file, content)

    monkeypatch.setattr(FarSide, "gather", counted)
    monkeypatch.setattr(FarSide, "fetch", lambda *_, **__: pytest.fail("a small file took a call of its own"))
    monkeypatch.setattr(Inventory, "put", cut_once)
    assert command.brought().missing == {}
    assert below(command.folder.artifacts / "outputs") == files
    assert len(calls) < 12
    assert command.proxy.cuts == 1
    again, calls[:] = command.brought(), []
    assert (len(again.here), calls) == (3000, []), "what is here is not asked for again"


def test_a_file_with_other_content_is_fetched_alone_or_named(command: Command) -> None:
    command.clear()
    files = {b"%d" % number: b"content %d" % number for number in range(30)}
    make(command.work, files)
    command.outputs.look(0, is_last=True)
    (command.out / "outputs" / "7").write_bytes(b"CONTENT 7")
    (command.out / "outputs" / "8").unlink()
    (command.out / "outputs" / "9").write_bytes(b"longer than it was")
    downloads = command.brought()
    assert {name: why.code for name, why in downloads.missing.items()} == {
        "outputs/7": "collect.wrong_digest", "outputs/8": "far.no_such_file", "outputs/9": "far.no_such_file",
    }  # fmt: skip
    assert below(command.folder.artifacts / "outputs") == {name: files[name] for name in files if name not in b"789"}


def test_a_disk_the_command_filled_still_lists_what_is_finished(command: Command) -> None:
    command.clear()
    disk = command.place.folder
    shutil.copy(disk / "agent.pyz", disk.parent)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", disk], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        shutil.copy(disk.parent / "agent.pyz", disk)
        command.clear()
        finished = {b"ckpt %d.pt" % number: b"w" * 100_000 for number in range(20)}
        make(command.work, finished)
        with pytest.raises(OSError, match="No space"):
            (command.work / "huge").write_bytes(bytes(16 << 20))
        command.outputs.look(0)
        command.outputs.look(0, is_last=True)
        assert command.outputs.unpublished == []
        assert command.brought().missing == {}
        here = below(command.folder.artifacts / "outputs")
        assert {name: here[name] for name in finished} == finished
    finally:
        command.far.close()
        time.sleep(0.1)
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_name_this_computer_cannot_hold_is_kept_under_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This computer ignores case in file names and allows no colon: such files get other names."""
    from gpurun.core import artifact_names

    monkeypatch.setattr(artifact_names._Trial, "_may_store_part", lambda self, part: b":" not in part)
    monkeypatch.setattr(artifact_names._Trial, "__enter__", folding(artifact_names._Trial.__enter__))
    names = [
        "outputs/a%3Ab/m.pt",
        "outputs/Model.pt",
        "outputs/model.pt",
        "outputs/plain",
        "outputs/" + "/".join(["y" * 203] * 20),
    ]
    artifact_names.make_room_for_names(tmp_path, names)
    places = {name: path_of(tmp_path, name).relative_to(tmp_path).as_posix() for name in names}
    assert places["outputs/plain"] == "outputs/plain"
    assert places["outputs/Model.pt"] == "outputs/Model.pt"
    assert places["outputs/model.pt"].startswith("renamed/")
    assert places["outputs/model.pt"].endswith("-model.pt")
    assert places[names[0]].endswith("-m.pt")
    assert places[names[-1]].startswith("renamed/")
    artifact_names.make_room_for_names(tmp_path, [*names, "outputs/c%3Ad"])
    assert {name: path_of(tmp_path, name).relative_to(tmp_path).as_posix() for name in names} == places
    assert '"outputs/c%3Ad": "renamed/' in (tmp_path / "outputs.names.json").read_text()


def folding(real: Any) -> Any:
    def enter(self: Any) -> Any:
        entered = real(self)
        entered.folds = True
        return entered

    return enter
