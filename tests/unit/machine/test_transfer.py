"""Tests of uploads and downloads over a real sshd: they arrive whole despite cuts, without starting again."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Place

from gpurun.remote import chunks
from gpurun.remote import client as far_side
from gpurun.remote.archive import Pack, survey
from gpurun.remote.client import FarSide, lanes_for
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import ManifestFile
from gpurun.remote.ssh import transport
from tests.emulators import sshd
from tests.emulators.proxy import Proxy

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())


def shards(folder: Path, *sizes: int) -> Path:
    """Write files of these sizes in bytes that do not compress, and return their folder."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        (folder / f"train_{number:06d}.bin").write_bytes(random.Random(number).randbytes(size))
    return folder


def far_behind(place: Place, proxy: Proxy) -> FarSide:
    far = FarSide(place.machine(proxy.port), python=sys.executable)
    far.install_agent()
    return far


def patiently(attempt: Callable[[], object]) -> None:
    """Make an attempt and repeat it after each broken connection, at most eight times."""
    for _ in range(8):
        with suppress(MachineLost):
            attempt()
            return
    pytest.fail("it never got there")


def assert_same(there: Path, here: Path) -> None:
    assert [path.name for path in sorted(there.iterdir())] == [path.name for path in sorted(here.iterdir())]
    for path in here.iterdir():
        is_same = (there / path.name).read_bytes() == path.read_bytes()
        assert is_same, path.name


def test_a_longer_way_gets_more_lanes() -> None:
    assert [lanes_for(round_trip_s) for round_trip_s in (0.0005, 0.04, 0.1, 0.2)] == [1, 1, 7, 8]


def test_a_line_cut_repeatedly_costs_only_what_was_under_way(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LEAST_PART_BYTES", 1 << 18)
    data = shards(tmp_path / "data", 20 << 20, 12 << 20)
    proxy = place.proxy(round_trip_s=0.05)
    far = far_behind(place, proxy)
    pack = Pack(survey({"data": data}))
    next_cut = [6 << 20]

    def cut_now_and_then(done: int) -> None:
        if done >= next_cut[0]:
            next_cut[0] += 14 << 20
            proxy.cut()

    patiently(lambda: far.unpack(pack, on_progress=cut_now_and_then))
    assert proxy.cuts >= 2
    assert_same(place.folder / "data", data)
    # Starting again at each cut would send 1.77 times the bytes; what is in the sockets of eight lanes is lost.
    assert pack.sent_bytes <= 1.6 * pack.survey.total_bytes


def test_a_line_that_corrupts_what_it_carries_damages_nothing(place: Place, tmp_path: Path) -> None:
    data = shards(tmp_path / "data", 8 << 20)
    proxy = place.proxy()
    far = far_behind(place, proxy)
    blocks = iter([2])
    patiently(lambda: far.unpack(Pack(survey({"data": data})), on_progress=lambda _: proxy.corrupt(next(blocks, 0))))
    assert next(blocks, None) is None
    assert_same(place.folder / "data", data)


def test_what_a_dead_supervisor_has_sent_is_not_sent_again(place: Place, tmp_path: Path) -> None:
    data = shards(tmp_path / "data", 48 << 20)  # Large enough that most of it is not there at the death.
    first, second = (Pack(survey({"data": data})) for _ in range(2))

    class Died(BaseException):
        pass

    def die(done: int) -> None:
        if done > 8 << 20:
            raise Died

    far = far_behind(place, place.proxy())
    with pytest.raises(Died):
        far.unpack(first, on_progress=die)
    assert not (place.folder / "data").exists()
    far_behind(place, place.proxy()).unpack(second)
    assert_same(place.folder / "data", data)
    assert first.sent_bytes + second.sent_bytes <= 1.3 * second.survey.total_bytes


def test_a_disk_that_fills_up_over_there_is_told_as_such(place: Place, tmp_path: Path) -> None:
    data = shards(tmp_path / "data", 6 << 20)
    place.folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place.folder], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        far = far_behind(place, place.proxy())
        with pytest.raises(FarRefusal) as refused:
            far.unpack(Pack(survey({"data": data})))
        assert (refused.value.reason, refused.value.needed_bytes) == ("disk_full", 6 << 20)
    finally:
        subprocess.run(["umount", "-l", place.folder], check=True)


# Downloads


def finished(place: Place, size: int) -> ManifestFile:
    """Write a checkpoint on the machine, as the trainer leaves it; return its manifest entry."""
    content = random.Random(7).randbytes(size)
    named = {"name": "checkpoints/1.model.safetensors", "bytes": size, "kind": "weights", "step": 1}
    file = ManifestFile(**{**named, "sha256": hashlib.sha256(content).hexdigest()})
    (place.folder / "out" / "checkpoints").mkdir(parents=True)
    (place.folder / "out" / file.name).write_bytes(content)
    manifest = {"v": 1, "latest": 1, "best": None, "files": [file.as_json()]}
    (place.folder / "out" / "MANIFEST.json").write_text(json.dumps(manifest))
    return file


def test_a_checkpoint_comes_home_over_many_lanes_despite_a_cut(place: Place, tmp_path: Path) -> None:
    file = finished(place, 40 << 20)
    proxy = place.proxy(round_trip_s=0.1)
    far, next_cut = far_behind(place, proxy), [8 << 20]

    def cut_now_and_then(have: int) -> None:
        if have >= next_cut[0]:
            next_cut[0] += 12 << 20
            proxy.cut()

    patiently(lambda: far.fetch(file.name, file.bytes, file.sha256, tmp_path, on_progress=cut_now_and_then))
    assert proxy.cuts >= 2
    assert proxy.connections > 4
    is_same = (tmp_path / file.name).read_bytes() == (place.folder / "out" / file.name).read_bytes()
    assert is_same
    assert not any((tmp_path / ".partial").iterdir())


def test_a_checkpoint_comes_whole_over_a_cut_and_corrupting_line(place: Place, tmp_path: Path) -> None:
    file = finished(place, 96 << 20)  # When a fast line is cut, some megabytes are under way.
    proxy = place.proxy(round_trip_s=0.05)
    far, troubles = far_behind(place, proxy), [proxy.cut, lambda: proxy.corrupt(1)]

    def trouble_now_and_then(have: int) -> None:
        if troubles and have >= (3 - len(troubles)) * 30 << 20:
            troubles.pop()()

    before = proxy.connections
    patiently(lambda: far.fetch(file.name, file.bytes, file.sha256, tmp_path, on_progress=trouble_now_and_then))
    assert (troubles, proxy.connections - before >= 2) == ([], True), "each of them was felt"
    is_same = (tmp_path / file.name).read_bytes() == (place.folder / "out" / file.name).read_bytes()
    assert is_same
    assert proxy.brought_bytes <= 1.3 * file.bytes


def test_keys_are_changed_while_programs_end_without_a_stall(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport.Packets, "REKEY_BYTES", 3 << 20)
    monkeypatch.setattr(far_side, "_SHARED_LANES", 8)
    file = finished(place, 40 << 20)
    proxy = place.proxy(round_trip_s=0.1)
    far = far_behind(place, proxy)
    far.fetch(file.name, file.bytes, file.sha256, tmp_path)
    assert proxy.connections == 1, "a connection that stalls is given up, and made again"


def test_what_a_dead_supervisor_has_fetched_is_not_fetched_again(place: Place, tmp_path: Path) -> None:
    file = finished(place, 24 << 20)

    class Died(BaseException):
        pass

    def die(have: int) -> None:
        if have > 12 << 20:
            raise Died

    with pytest.raises(Died):
        far_behind(place, place.proxy()).fetch(file.name, file.bytes, file.sha256, tmp_path, on_progress=die)
    proxy = place.proxy()
    (listed,) = (tmp_path / ".partial").glob("*.parts")
    listed.write_bytes(listed.read_bytes() + b"9437184 10")  # The dead process did not finish its last note.
    far_behind(place, proxy).fetch(file.name, file.bytes, file.sha256, tmp_path)
    is_same = (tmp_path / file.name).read_bytes() == (place.folder / "out" / file.name).read_bytes()
    assert is_same
    assert proxy.brought_bytes <= 13 << 20


@pytest.mark.parametrize("most", [1, 2])
def test_a_server_of_few_programs_per_connection_gets_several(place: Place, tmp_path: Path, most: int) -> None:
    data = shards(tmp_path / "data", 6 << 20, 1 << 20)
    server = place.serve(f"MaxSessions {most}")
    far = FarSide(place.machine(server.port), python=sys.executable)
    far.install_agent()
    far.unpack(Pack(survey({"data": data})), "gzip", timeout_s=60)
    assert_same(place.folder / "data", data)
    (place.folder / "out").mkdir(exist_ok=True)
    (place.folder / "out" / "big").write_bytes(content := random.Random(5).randbytes(12 << 20))
    digest = hashlib.sha256(content).hexdigest()
    entry = ManifestFile(name="big", bytes=len(content), sha256=digest, kind="sample", step=1)
    manifest = {"v": 1, "latest": 1, "best": None, "files": [entry.as_json()]}
    (place.folder / "out" / "MANIFEST.json").write_text(json.dumps(manifest))
    with far.many_lanes():
        assert far.fetch("big", len(content), digest, tmp_path / "home").read_bytes() == content
    assert server.connections <= 6, "they are kept"
