"""Tests of packed files and archives: read in place, refused if damaged, and limited in size like plain files."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from gpurun.core.errors import UsageError
from gpurun.data import archive_members
from gpurun.data.prepare import PrepareOrder, prepare
from gpurun.data.refusals import MOST_ROW_BYTES
from tests.memory import forget_own_peak, own_growth_bytes
from tests.refusals import refusal
from tests.unit.data.documents import in_parts
from tests.unit.data.layouts import opened, refused, texts

ROWS = [f"row {number} — of many\n" for number in range(400)]
PLAIN = "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode()
PACKS: dict[str, Callable[[bytes], bytes]] = {"xz": lzma.compress, "bz2": bz2.compress}
TAR_PACKS: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar.gz": gzip.compress,
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
    "tar.zst": zstandard.ZstdCompressor().compress,
}
MEMBERS = {
    "c/a.txt": b"A text.\n" * 30,
    "c/b.jsonl": PLAIN,
    "c/b.csv.gz": gzip.compress(b"id,text\n" + b"".join(b'%d,"cell, %d"\n' % (n, n) for n in range(50))),
    "c/.hidden": b"hidden\n",
    "c/model.bin": b"\0\1\2\3" * 9,
}


def tar_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("c/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return out.getvalue()


def zip_of(members: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_packed_file_gives_every_row_once_in_every_division(tmp_path: Path, pack: str, parts: int) -> None:
    size = len(PLAIN) // parts + 1
    raw = b"".join(PACKS[pack](PLAIN[at : at + size]) for at in range(0, len(PLAIN), size))
    (tmp_path / "rows").write_bytes(raw + b"\0" * 8 * (pack == "xz"))
    for step in (100_000, 997, 131):
        assert in_parts(tmp_path / "rows", [*range(0, len(PLAIN), step)]) == ROWS


@pytest.mark.parametrize("pack", PACKS)
def test_a_packed_file_with_something_wrong_is_named(tmp_path: Path, pack: str) -> None:
    packed = PACKS[pack](PLAIN)
    for name, raw, code in (
        ("cut", packed[: len(packed) // 2], "data.cut_short"),
        ("flipped", packed[:60] + bytes([packed[60] ^ 255]) + packed[61:], "data.cut_short"),
        ("behind", packed + b"<html>502 Bad Gateway</html>", "data.bytes_behind"),
    ):
        (tmp_path / name).write_bytes(raw)
        refused(tmp_path / name, code, name)


def test_xz_with_a_window_that_takes_gigabytes_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29, "mf": lzma.MF_HC3, "mode": lzma.MODE_FAST, "depth": 1}]
    packed = bytearray(lzma.compress(PLAIN, filters=[{**filters[0], "dict_size": 1 << 20}]))
    packed[16] = 34  # 512 MB, in the block header's filter flags
    length = (packed[12] + 1) * 4
    packed[12 + length - 4 : 12 + length] = zlib.crc32(bytes(packed[12 : 12 + length - 4])).to_bytes(4, "little")
    (tmp_path / "a.xz").write_bytes(bytes(packed))
    refused(tmp_path / "a.xz", "data.window_too_large", "more than 128 MB (xz)")


@pytest.mark.parametrize("name", [*TAR_PACKS, "zip", "stored.zip", "bzip2.zip"])
def test_an_archive_is_a_folder_of_its_files(tmp_path: Path, name: str) -> None:
    how = {"stored.zip": zipfile.ZIP_STORED, "bzip2.zip": zipfile.ZIP_BZIP2}.get(name, zipfile.ZIP_DEFLATED)
    raw = TAR_PACKS[name](tar_of(MEMBERS)) if name in TAR_PACKS else zip_of(MEMBERS, how)
    (tmp_path / f"x.{name}").write_bytes(raw)
    found = texts(tmp_path / f"x.{name}")
    cells = [f"cell, {number}" for number in range(50)]
    assert found == ["A text.\n" * 30, *ROWS, *cells]
    passed = opened(tmp_path / f"x.{name}").passed_over
    assert passed == {"hidden": 1, "binary": 1} | ({"links": 1} if name in TAR_PACKS else {})
    (tmp_path / "beside.txt").write_text("beside\n")
    assert "beside\n" in texts(tmp_path)
    assert len(texts(tmp_path)) == len(found) + 1


@pytest.mark.parametrize("name", ["tar", "tar.xz", "zip"])
def test_an_archive_becomes_the_shards_of_its_unpacked_folder(tmp_path: Path, name: str) -> None:
    members = {f"{n:03}.jsonl": PLAIN for n in range(3)}
    raw = TAR_PACKS[name](tar_of(members)) if name in TAR_PACKS else zip_of(members)
    (tmp_path / f"x.{name}").write_bytes(raw)
    folder = tmp_path / "folder"
    folder.mkdir()
    for member, content in members.items():
        (folder / member).write_bytes(content)
    shards = []
    for source in (tmp_path / f"x.{name}", folder):
        out = tmp_path / f"out-{source.name}"
        prepare(PrepareOrder(str(source), "char", out), lambda _: None, workers=2)
        manifest = json.loads((out / "data.json").read_bytes())
        shards.append([entry["sha256"] for entry in (*manifest["train"], *manifest["val"])])
    assert shards[0] == shards[1]


def test_a_damaged_or_cut_archive_is_never_a_shorter_one(tmp_path: Path) -> None:
    tar, packed = tar_of(MEMBERS), zip_of(MEMBERS, zipfile.ZIP_STORED)
    broken = tar[:1024] + b"x" * 512 + tar[1536:]
    place = packed.index(b"A text")
    wrong = {
        "cut.tar": tar[:1500],
        "cut.tar.gz": gzip.compress(tar)[:200],
        "header.tar": broken,
        "cut.zip": packed[: len(packed) // 2],
        "crc.zip": packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :],
    }
    for name, raw in wrong.items():
        (tmp_path / name).write_bytes(raw)
        refused(tmp_path / name, "data.cut_short", name)


def test_an_archive_that_is_encrypted_is_named(tmp_path: Path) -> None:
    raw = bytearray(zip_of({"a.txt": b"A text.\n" * 30}))
    raw[raw.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(bytes(raw))
    refused(tmp_path / "a.zip", "data.archive", "a.txt", "encrypted", "Unpack it")


def test_what_an_archive_says_of_its_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 3 << 30
    (tmp_path / "pax.tar.gz").write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(32 << 20)))
    forget_own_peak()
    refused(tmp_path / "pax.tar.gz", "data.cut_short", "3,221,225,472 bytes")
    assert own_growth_bytes() < 256 << 20
    (tmp_path / "many.tar").write_bytes(tar_of({str(n): b"x" for n in range(20)}))
    monkeypatch.setattr(archive_members, "MOST_MEMBERS", 10)
    refused(tmp_path / "many.tar", "data.archive", "more than 10 files")
    (tmp_path / "many.zip").write_bytes(zip_of({str(n): b"x" for n in range(20)}))
    monkeypatch.setattr(archive_members, "_MOST_DIRECTORY_BYTES", 100)
    refused(tmp_path / "many.zip", "data.archive")


@pytest.mark.parametrize("name", ["zip", "tar.xz", "tar.bz2"])
def test_an_archive_row_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, name: str) -> None:
    long = b'{"text": "one"}\n{"text": "' + b"a" * (MOST_ROW_BYTES + (32 << 20)) + b'"}\n'
    raw = TAR_PACKS[name](tar_of({"a.jsonl": long})) if name in TAR_PACKS else zip_of({"a.jsonl": long})
    path = tmp_path / f"x.{name}"
    path.write_bytes(raw)
    del long, raw
    forget_own_peak()
    with refusal(UsageError, "data.row_too_long", "a.jsonl", "offset 16", "64 MB"):
        prepare(PrepareOrder(str(path), "char", tmp_path / "out"), lambda _: None)
    assert own_growth_bytes() < 1 << 30
