"""Tests of a machine that pulls staged files: their URLs expire, all bytes are verified, and SSH sends the rest."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from gpurun.remote.agent.s3_pull import PulledFile
from gpurun.remote.agent.system import Refusal
from gpurun.remote.archive import Pack, survey
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal, Sink
from gpurun.remote.local_machine import LocalMachine
from gpurun.remote.s3 import objects, pull_request
from gpurun.remote.s3.pull_request import PullResult, have_pulled
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_upload import digests_of, stage_file
from gpurun.remote.s3.staged_files import StagedFile, staged_file
from tests.emulators.s3 import S3Emulator

SIZES = {"train_1.bin": 9 << 20, "train_2.bin": 3 << 20, "same.bin": 3 << 20, "small.json": 1000}


class Shipping:
    """Files on this computer, of which the large ones are staged, and a machine with an agent."""

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.data, self.bucket, self.box = folder / "data", bucket, folder / "box"
        self.data.mkdir()
        for seed, (name, size) in enumerate(SIZES.items()):
            (self.data / name).write_bytes(random.Random(1 if name == "same.bin" else seed).randbytes(size))
        self.pack = Pack(survey({"data": self.data}))
        self.staged = self.stage(folder / "notes")
        self.box.mkdir()
        self.far = FarSide(LocalMachine(self.box, "gr-test"), python=sys.executable)
        self.far.install_agent()
        self.came = PullResult()

    def stage(self, notes: Path) -> list[StagedFile]:
        staged = []
        for file in self.pack.survey.files:
            if objects.is_worth_staging(file.bytes):
                digests = digests_of(file, lambda: None)
                staged.append(staged_file(file, digests, stage_file(self.bucket, file, digests, notes, lambda _: None)))
        return staged

    def pull(self, files: Sequence[StagedFile] | None = None) -> PullResult:
        have_pulled(self.far, self.bucket, files or self.staged, self.came, on_progress=lambda: None, timeout_s=60)
        return self.came

    def ship(self) -> int:
        """Send over SSH what was not pulled, assert that all files arrived, and return the number of bytes sent."""
        self.pack.known.update({file.name: file.sha256 for file in self.staged})
        shipped = self.far.unpack(self.pack)
        assert shipped.files == len(SIZES)
        for name in SIZES:
            assert (self.box / "data" / name).read_bytes() == (self.data / name).read_bytes()
        return self.pack.sent_bytes

    def key_of(self, name: str) -> str:
        return objects.data_key(self.bucket, next(f.sha256 for f in self.staged if f.name == f"data/{name}"))


@pytest.fixture
def shipping(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> Shipping:
    return Shipping(tmp_path, bucket)


def test_staged_files_are_pulled_in_ranges_and_the_rest_is_sent(s3: S3Emulator, shipping: Shipping) -> None:
    before = len(s3.calls)
    came = shipping.pull()
    assert came.files == {file.sha256 for file in shipping.staged}
    assert came.failed == {}
    asked = [call for call in s3.calls[before:] if call.by_url and call.method == "GET"]
    assert len(asked) >= 3, "more than one range of the larger file"
    assert came.sent_bytes == sum(sum(f.sent) for f in {f.sha256: f for f in shipping.staged}.values())
    assert shipping.ship() < 5000
    assert not (shipping.box / ".pulled").exists()
    assert not (shipping.box / ".incoming").exists()


def test_pulled_again_after_a_cut_nothing_comes_twice(s3: S3Emulator, shipping: Shipping) -> None:
    def cut() -> None:
        if any((shipping.box / ".pulled").glob("*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        have_pulled(shipping.far, shipping.bucket, shipping.staged, shipping.came, on_progress=cut, timeout_s=60)
    shipping.pull()
    before = len([call for call in s3.calls if call.by_url])
    assert shipping.pull().files == {file.sha256 for file in shipping.staged}
    assert len([call for call in s3.calls if call.by_url]) == before
    assert shipping.ship() < 5000


def test_what_an_earlier_pack_has_left_there_is_not_pulled(s3: S3Emulator, shipping: Shipping) -> None:
    shipping.pull()
    shipping.ship()
    spoilt = shipping.box / "data" / "train_2.bin"
    spoilt.write_bytes(bytes(3 << 20))
    (shipping.box / "data" / "same.bin").write_bytes(bytes(3 << 20))
    shipping.came = PullResult()
    assert len(shipping.pull().files) == 2
    assert 0 < shipping.came.sent_bytes < 4 << 20, "what is spoilt, and not the larger file"


def test_an_answer_that_breaks_off_costs_what_was_under_way(s3: S3Emulator, shipping: Shipping) -> None:
    s3.cut(3)
    assert shipping.pull().failed == {}
    assert shipping.ship() < 5000


def test_urls_that_have_expired_in_mid_pull_are_made_anew(s3: S3Emulator, shipping: Shipping) -> None:
    s3.expire(3)
    came = shipping.pull()
    assert (came.failed, len(came.files)) == ({}, 2)
    assert shipping.ship() < 5000


def test_urls_that_expire_at_once_are_given_up_and_ssh_brings_it(s3: S3Emulator, shipping: Shipping) -> None:
    s3.expire(1000)
    came = shipping.pull()
    assert {one.code for one in came.failed.values()} == {"expired"}
    assert shipping.ship() > sum(SIZES.values()) * 0.7, "random bytes: they do not compress"


def test_more_parts_than_an_order_takes_are_ordered_in_turn(
    s3: S3Emulator, shipping: Shipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_request, "MOST_PARTS_AT_ONCE", 5)
    assert len(shipping.pull().files) == 2
    assert shipping.ship() < 5000


def test_an_altered_part_fails_and_ssh_sends_the_file(s3: S3Emulator, shipping: Shipping) -> None:
    s3.alter(shipping.key_of("train_1.bin"))
    came = shipping.pull()
    assert [one.code for one in came.failed.values()] == ["altered"]
    assert 0 < shipping.ship() < 10 << 20


def test_a_pulled_part_takes_no_room_beside_the_file_sent_by_ssh(s3: S3Emulator, shipping: Shipping) -> None:
    """The rented disk has room for only one copy of the shards, so the part is deleted before SSH sends the file."""
    s3.alter(shipping.key_of("train_1.bin"))
    shipping.pull()
    (partial,) = (shipping.box / ".pulled").glob("*.part")
    seen: list[bool] = []
    shipping.pack.known.update({file.name: file.sha256 for file in shipping.staged})
    pack = shipping.pack
    shipping.far.unpack(pack, on_progress=lambda _: seen.append(partial.exists()) if pack.sent_bytes else None)
    assert set(seen) == {False}


def test_a_bomb_in_an_objects_place_costs_no_memory_and_no_disk(s3: S3Emulator, shipping: Shipping) -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(256 << 20))
    key = shipping.key_of("train_2.bin")
    size = len(s3.content(key))
    s3.alter(key, bomb + bytes(size - len(bomb)))
    assert [one.code for one in shipping.pull().failed.values()] == ["altered"]
    assert sum(path.stat().st_size for path in (shipping.box / ".pulled").rglob("*")) < 20 << 20
    assert shipping.ship() > 0


def test_a_gone_or_short_object_is_refused_and_the_others_come(s3: S3Emulator, shipping: Shipping) -> None:
    key = shipping.key_of("train_1.bin")
    s3.alter(key, s3.content(key)[: 1 << 20])
    shipping.bucket.drop(shipping.key_of("train_2.bin"))
    came = shipping.pull()
    assert {one.code for one in came.failed.values()} <= {"altered", "absent", "unreachable"}
    assert len(came.failed) == 2
    assert shipping.ship() > 0


def test_a_bucket_the_machine_cannot_reach_costs_the_run_nothing(
    shipping: Shipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    elsewhere = Bucket(shipping.bucket.address, shipping.bucket._clock)
    have_pulled(shipping.far, elsewhere, shipping.staged, shipping.came, on_progress=lambda: None, timeout_s=60)
    assert {one.code for one in shipping.came.failed.values()} == {"unreachable"}
    assert shipping.ship() > 0


def test_after_a_reboot_pulled_files_are_read_before_they_count(s3: S3Emulator, shipping: Shipping) -> None:
    shipping.pull()
    for parts in (shipping.box / ".pulled").glob("*.parts"):
        parts.write_text(parts.read_text().replace("boot ", "boot of-yesterday-", 1))
    damaged = next(path for path in (shipping.box / ".pulled").iterdir() if path.stat().st_size == 9 << 20)
    damaged.write_bytes(bytes(9 << 20))
    assert shipping.ship() > 8 << 20, "the one that the power cut has spoilt, and only that one"
    assert shipping.pack.sent_bytes < 11 << 20


def test_no_url_is_in_a_file_or_process_name_on_the_machine(s3: S3Emulator, shipping: Shipping) -> None:
    seen: list[bytes] = []

    def look() -> None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                for name in ("cmdline", "environ"):
                    try:
                        seen.append((entry / name).read_bytes())
                    except OSError:
                        continue

    have_pulled(shipping.far, shipping.bucket, shipping.staged, shipping.came, on_progress=look, timeout_s=60)
    seen += [path.read_bytes() for path in shipping.box.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20]
    assert seen
    assert not [one for one in seen if b"X-Amz-Signature" in one]


def test_a_disk_without_room_is_refused_first_with_the_size(s3: S3Emulator, shipping: Shipping) -> None:
    part = 8 << 20
    count = shutil.disk_usage(shipping.box).free // part + 10
    huge = {"sha256": "0" * 64, "bytes": count * part, "part_bytes": part, "codec": "zstd"}
    with pytest.raises(FarRefusal) as refusal:
        _ask(shipping.far, {**huge, "parts": [[9, "0" * 64]] * count, "url": "http://127.0.0.1:9/"})
    assert (refusal.value.reason, refusal.value.needed_bytes) == ("disk_full", count * part)


def test_an_order_that_does_not_add_up_is_refused(shipping: Shipping) -> None:
    for wrong in ({"bytes": 1}, {"part_bytes": 0}, {"sha256": "../../x"}, {"parts": []}):
        with pytest.raises(FarRefusal) as refusal:
            _ask(shipping.far, {**_asked(shipping.staged[0]), **wrong})
        assert refusal.value.reason == "usage"


def _asked(file: StagedFile) -> dict[str, object]:
    parts = list(zip(file.sent, file.digests, strict=True))
    return {"sha256": file.sha256, "bytes": file.bytes, "part_bytes": file.part_bytes, "codec": "zstd",
            "parts": parts, "url": "http://127.0.0.1:9/"}  # fmt: skip


def _ask(far: FarSide, file: dict[str, object]) -> None:
    content = json.dumps({"v": 1, "files": [file]}).encode()
    far.ask("pull", "--sha256", hashlib.sha256(content).hexdigest(), stdin=[content], site=True)


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "../" * 21 + "x", "G" * 64])
def test_what_is_no_digest_names_no_file_over_there(digest: str, tmp_path: Path) -> None:
    fields = {"sha256": digest, "parts": [], "bytes": 0, "part_bytes": 1, "url": "", "codec": "zstd"}
    with pytest.raises(Refusal, match="digest"):
        PulledFile(str(tmp_path), fields, {})
    assert list(tmp_path.iterdir()) == []


class Claiming:
    """A machine that reports files that it was not told to pull."""

    def ask(
        self, verb: str, *options: str, stdin: Iterable[bytes], sink: Sink, site: bool, timeout_s: float
    ) -> tuple[bytes, bytes]:
        failed = [{"sha256": "e" * 64, "code": "altered", "message": "I say so"}]
        sink(b'{"files": 1}\n' + json.dumps({"bytes": 0, "pulled": ["f" * 64], "failed": failed}).encode() + b"\n")
        return b"", b""


def test_a_machines_claims_about_unasked_files_count_for_nothing(shipping: Shipping) -> None:
    shipping.far = Claiming()  # type: ignore[assignment]
    came = shipping.pull()
    assert (came.files, came.failed) == (set(), {})
