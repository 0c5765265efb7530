"""Tests of data files made to use up a reader's memory: each is refused, with its row and the limit."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpurun.core.errors import GpurunError, UsageError
from gpurun.data.parquet import rows
from gpurun.data.prepare import PrepareOrder, prepare
from gpurun.data.refusals import MOST_ROW_BYTES
from gpurun.data.shard_folder import inspect_data
from tests.command_line import gpurun
from tests.memory import forget_own_peak, own_growth_bytes
from tests.refusals import lacking, refusal

MOST_MEMORY_BYTES = 1 << 30
LETTERS = b"a" * (1 << 20)
LONG = 300


def megabytes(head: bytes = b"", tail: bytes = b"") -> Iterator[bytes]:
    """Yield `head`, then `LONG` blocks of one letter, then `tail`."""
    yield head
    yield from (LETTERS for _ in range(LONG))
    yield tail


def gzipped(path: Path, parts: Iterator[bytes]) -> None:
    with gzip.open(path, "wb", compresslevel=1) as out:
        for part in parts:
            out.write(part)


def zstd(path: Path, parts: Iterator[bytes]) -> None:
    import zstandard

    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as out:
        for part in parts:
            out.write(part)


ROWS = b'{"text": "one"}\n{"text": "two"}\n'
BOMBS: dict[str, tuple[Callable[[Path, Iterator[bytes]], None], bytes, bytes, str]] = {
    "a line in gzip": (gzipped, ROWS + b'{"text": "', b'"}\n', "line at offset 32"),
    "a line in zstd": (zstd, ROWS + b'{"text": "', b'"}\n', "line at offset 32"),
    "a line that is no text of its row": (zstd, ROWS + b'{"other": "', b'"}\n', "line at offset 32"),
    "an object of an array": (zstd, b'[{"text": "one"}, {"text": "', b'"}]', "object 1"),
    "a cell without quotes": (
        zstd,
        b"text,of\none,1\ntwo,2\nthree,3\n" + b"x," * 40_000,
        b",4\n",
        "the row that ends after line 5",
    ),
    "a text between marks": (zstd, b"one<|endoftext|>", b"<|endoftext|>two", "text at offset 16"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_row_that_unpacks_to_gigabytes_is_named_with_its_bound(name: str, tmp_path: Path) -> None:
    pack, head, tail, where = BOMBS[name]
    path = tmp_path / "bomb"
    pack(path, megabytes(head, tail))
    assert path.stat().st_size < 3 << 20
    forget_own_peak()
    with pytest.raises(UsageError) as refused:
        prepare(PrepareOrder(str(path), "char", tmp_path / "out"), lambda _: None)
    assert refused.value.code == "data.row_too_long"
    assert lacking(refused.value.what, f"{path}, {where}", "64 MB") == []
    assert own_growth_bytes() < MOST_MEMORY_BYTES


@pytest.mark.parametrize(
    "text", [ROWS + b'{"text": "a", "x": [%s]}\n', b'[{"text": "a", "x": [%s]}]'], ids=["lines", "array"]
)
def test_a_row_of_millions_of_objects_is_refused_before_parsing(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(text % (b"{}," * (5 << 20) + b"{}"))
    forget_own_peak()
    with refusal(UsageError, "data.bad_line", "2,000,000 members"):
        prepare(PrepareOrder(str(path), "char", tmp_path / "out"), lambda _: None)
    assert own_growth_bytes() < MOST_MEMORY_BYTES


def test_commas_of_a_long_text_are_no_members(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text(json.dumps({"text": 'a, "b\\", ' * 400_000}) + '\n{"text": "two three"}\n')
    assert prepare(PrepareOrder(str(path), "char", tmp_path / "out", val_fraction=0.5), lambda _: None).made


def test_an_array_is_read_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "array"
    with path.open("w") as out:
        for number in range(9000):
            row = {"text": f"{number} {'word ' * 2000}", "n": [number, 1.5]}
            out.write(f"{',' if number else '['}\n{json.dumps(row)}")
        out.write("]")
    forget_own_peak()
    made = prepare(PrepareOrder(str(path), "char", tmp_path / "out"), lambda _: None)
    assert made.manifest["source"]["documents"] == 9000
    assert own_growth_bytes() < MOST_MEMORY_BYTES


def test_a_parquet_page_is_judged_by_the_size_that_it_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "one.parquet"
    pq.write_table(pa.table({"text": ["a" * (2 << 20)]}), path, compression="zstd", use_dictionary=False)
    assert len(list(rows(path, [0], ["text"]))) == 1
    monkeypatch.setattr("gpurun.data.parquet_pages.MOST_PAGE_BYTES", 1 << 20)
    with refusal(UsageError, "data.page_too_large", "1 values", "1,048,576"):
        list(rows(path, [0], ["text"]))


def test_a_parquet_row_is_bounded_and_a_dictionary_takes_no_room(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "row.parquet"
    table = pa.table({"text": ["one", "a" * (MOST_ROW_BYTES + 1)]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    with refusal(UsageError, "data.row_too_long", "row.parquet", "64 MB"):
        list(rows(path, [0], ["text"]))
    word = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["a" * (2 << 20)]))
    pq.write_table(pa.table({"text": word}), path, compression="zstd", write_statistics=False)
    assert path.stat().st_size < 2000
    del table, word
    pa.default_memory_pool().release_unused()
    forget_own_peak()
    assert sum(1 for _ in rows(path, [0], ["text"])) == 2000
    assert own_growth_bytes() < MOST_MEMORY_BYTES


@pytest.mark.parametrize("version", ["1.0", "2.6"])
@pytest.mark.parametrize("page", ["1.0", "2.0"])
def test_parquet_as_writers_make_it_is_read_whole(tmp_path: Path, version: str, page: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"row {number} " + "x" * (number % 500) for number in range(20_000)]
    table = pa.table({"text": texts, "url": [f"https://example.org/{number % 7}" for number in range(20_000)]})
    path = tmp_path / "whole.parquet"
    pq.write_table(table, path, version=version, data_page_version=page, row_group_size=7000)
    assert [cells["text"] for _, cells, _ in rows(path, range(3), ["text"])] == texts


def test_a_huge_or_nested_npy_header_is_not_taken_for_a_shard(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    (tmp_path / "text").write_text("".join(f"The quick brown fox {n} jumps.\n" for n in range(90)))
    prepare(PrepareOrder(str(tmp_path / "text"), "char", shards, val_fraction=0.3), lambda _: None)
    manifest = json.loads((shards / "data.json").read_bytes())
    entry = manifest["train"][0]
    entry.pop("bytes", None)
    entry["name"] = "train.npy"
    (shards / "data.json").write_text(json.dumps(manifest))
    path = shards / "train.npy"
    for header, size in ((b"{", 0xF0000000), (b"-" * 9000 + b"1", 9001), (b"[" * 9000, 9000)):
        with path.open("wb") as out:
            out.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", size) + header)
            out.truncate(12 + size if size > 1 << 20 else out.tell() + 64)
        forget_own_peak()
        with pytest.raises(GpurunError) as refused:
            inspect_data(shards)
        assert refused.value.code in ("data.npy", "data.truncated")
        assert own_growth_bytes() < MOST_MEMORY_BYTES
        done = gpurun("data", "adopt", str(shards), "--tokenizer", "gpt2", "--out", str(tmp_path / "adopted"))
        assert done.returncode in (2, 4)
        assert "itself failed" not in done.stderr
