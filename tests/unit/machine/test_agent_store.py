"""A box that is kept is not sent again what it has from an earlier run, if that was wanted and is still what it was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Box

from gpurun.core.clock import boot_id
from gpurun.core.exclusive import exclusive
from gpurun.machine.agent import files, settle, store
from gpurun.machine.agent.incoming import Incoming
from gpurun.machine.far import FarSide
from gpurun.machine.pack import Pack, survey

MB = 1 << 20


def shard(folder: Path, seed: int, size: int = 3 * MB) -> Path:
    """A folder with one shard that does not compress, and a small file beside it."""
    folder.mkdir(exist_ok=True)
    (folder / f"train_{seed:06d}.bin").write_bytes(random.Random(seed).randbytes(size))
    (folder / "data.json").write_text("{}")
    return folder


class Kept:
    """A box that runs come to, one after the other."""

    def __init__(self, home: Path) -> None:
        self.home, self.runs = home, 0
        self.store = home / "store"

    def run(self, data: Path, *, store_bytes: int = 1 << 40, ends: bool = False) -> int:
        """One run's shipping: it is in place as it is here; what was sent of it, in bytes."""
        self.runs += 1
        box = Box(self.home / f"gr-test-{self.runs}")
        box.far.store_bytes = store_bytes
        pack = Pack(survey({"bundle/trainer/train.py": b"pass", "data": data}))
        box.far.unpack(pack)
        for path in data.iterdir():
            assert (box.folder / "data" / path.name).read_bytes() == path.read_bytes()
        if ends:
            box.far.farewell()
            assert not box.folder.exists()
        return pack.sent_bytes

    @property
    def names(self) -> list[str]:
        return store.stored(str(self.store)) if self.store.exists() else []


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "kept")


def test_the_next_run_is_not_sent_what_the_box_has_though_the_first_one_is_gone(kept: Kept, tmp_path: Path) -> None:
    data = shard(tmp_path / "data", 1)
    assert kept.run(data, ends=True) > 3 * MB
    assert kept.run(data) < 100_000
    shard(data, 2)
    assert 3 * MB < kept.run(data) < 4 * MB, "only what is new"
    assert len(kept.names) == 2


def test_what_is_still_to_be_sent_does_not_count_as_there(kept: Kept, tmp_path: Path) -> None:
    data, there = shard(tmp_path / "data", 1), list[int]()
    kept.run(data, ends=True)
    shard(data, 2, size=4 * MB)
    box, pack = Box(kept.home / "next"), Pack(survey({"data": data}))

    class Watched(FarSide):
        store_bytes = 1 << 40

        def lanes(self, count: int) -> list[FarSide]:
            there.append(pack.content_bytes)
            return super().lanes(count)

    told: list[int] = []
    Watched(box.machine, python=box.far._python).unpack(pack, on_progress=told.append)
    assert there[0] == 0
    assert 3 * MB <= there[-1] < 4 * MB, "one is held, and nothing of the other was sent"
    assert told == sorted(told)
    assert pack.content_bytes == pack.survey.total_bytes


def test_without_being_asked_nothing_is_kept_and_nothing_used(kept: Kept, tmp_path: Path) -> None:
    data = shard(tmp_path / "data", 1)
    kept.run(data, store_bytes=0)
    assert not kept.store.exists()
    kept.run(data)
    assert kept.run(data, store_bytes=0) > 3 * MB


def test_what_was_altered_there_is_sent_again_and_takes_the_place_of_the_altered(kept: Kept, tmp_path: Path) -> None:
    data = shard(tmp_path / "data", 1)
    kept.run(data)
    (path,) = (kept.store / name for name in kept.names)
    assert path.stat().st_mode & 0o222 == 0
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert kept.run(data) > 3 * MB
    assert kept.run(data) < 100_000


def test_what_was_altered_there_is_not_believed_for_what_a_bucket_has_brought_in_part(
    kept: Kept, tmp_path: Path
) -> None:
    data = shard(tmp_path / "data", 1)
    kept.run(data)
    (path,) = (kept.store / name for name in kept.names)
    path.chmod(0o644)
    path.write_bytes(bytes(3 * MB))
    pulled = kept.home / f"gr-test-{kept.runs + 1}" / ".pulled"
    pulled.mkdir(parents=True)
    (pulled / f"{path.name}.part").write_bytes(b"the first part")
    (pulled / f"{path.name}.parts").write_text(f"boot {boot_id()}\n0 {'0' * 64}\n")
    assert kept.run(data) > 3 * MB


def keep(kept: Kept, *digits: str, most_bytes: int = 1 << 40) -> list[str]:
    """A run whose shards have these digests is in place, and kept; the digests that the box has then."""
    root = kept.home / "gr-by-hand"
    (root / "data").mkdir(parents=True, exist_ok=True)
    entries = [{"name": f"data/{digit}.bin", "bytes": 2 * MB, "sha256": digit * 64} for digit in digits]
    for entry in entries:
        (root / str(entry["name"])).unlink(missing_ok=True)
        (root / str(entry["name"])).write_bytes(bytes(2 * MB))
    store.keep(str(root), entries, most_bytes)
    return [name[0] for name in kept.names]


def test_what_was_used_longest_ago_makes_room(kept: Kept) -> None:
    for digits in ("1", "2", "1", "3"):
        have = keep(kept, *digits, most_bytes=5 * MB)
    assert have == ["1", "3"]
    assert keep(kept, "4", "5", "6", most_bytes=5 * MB) == ["5", "6"], "the cap holds whatever comes"


def test_it_takes_no_more_than_half_of_what_the_disk_could_take(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * MB))
    assert keep(kept, "1", "2") == ["2"]


def test_while_another_run_is_at_it_nothing_is_put_in_or_taken_out(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(kept, "1")
    monkeypatch.setattr(store, "LOCK_S", 0.1)
    with exclusive(kept.store / "agent" / "store.lock"):
        assert keep(kept, "2") == ["1"]
        store.take_out(str(kept.home / "gr-other"), {2 * MB}, str(tmp_path / "into"))
        assert not (tmp_path / "into").exists()
    store.take_out(str(kept.home / "gr-other"), {2 * MB}, str(tmp_path / "into"))
    assert [path.name[0] for path in (tmp_path / "into").iterdir()] == ["1"]


def test_a_disk_without_links_leaves_nobody_locked_out(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: str) -> None:
        raise PermissionError("this disk has no links")

    monkeypatch.setattr(store.os, "link", no_links)
    with pytest.raises(PermissionError, match="no links"):
        keep(kept, "1")
    held = files.lock(str(kept.store), "store.lock", 0)
    assert held is not None
    os.close(held)


def test_on_a_disk_without_links_what_a_bucket_has_brought_is_copied_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over SMB, or on a file system of a cluster that links only within one folder."""

    def unlinkable(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    content = random.Random(1).randbytes(3 * MB)
    sha256 = hashlib.sha256(content).hexdigest()
    layout = {"part_bytes": MB, "files": [], "v": 1}
    for folder in ("agent", ".pulled", ".incoming/x/files"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / ".pulled" / sha256).write_bytes(content)
    (tmp_path / ".incoming/x/layout.json").write_text(json.dumps(layout))
    monkeypatch.setattr(os, "link", unlinkable)
    entries = [{"name": "data/a.bin", "bytes": len(content), "sha256": sha256}]
    (tmp_path / ".incoming/x/files/data").mkdir()
    (tmp_path / ".incoming/x/files/data/a.bin").write_bytes(content[:MB])  # A crash had left half a copy.
    settle.gather(str(tmp_path), Incoming(str(tmp_path / ".incoming/x")), entries)
    assert (tmp_path / ".incoming/x/files/data/a.bin").read_bytes() == content


def test_two_runs_at_once_do_not_take_from_each_other(kept: Kept, tmp_path: Path) -> None:
    data = shard(tmp_path / "data", 1)
    kept.run(data)
    kept.run(data, store_bytes=1)
    assert kept.names == [], "the cap holds, whoever still uses it"
    first = kept.home / "gr-test-1" / "data" / "train_000001.bin"
    assert first.read_bytes() == (data / first.name).read_bytes()
