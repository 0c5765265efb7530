"""Pages of Parquet read in parts: what pyarrow wrote comes out again, whatever it was packed with."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.prepare.errors import Refusal
from trainer.prepare.sources import parquet as parquet_rows
from trainer.prepare.sources.files import Span
from trainer.prepare.sources.opening import open_source
from trainer.prepare.sources.pages import headers, snappy
from trainer.prepare.sources.pages.codecs import CODECS, Unpacked
from trainer.prepare.sources.pages.part import Part
from trainer.prepare.sources.pages.values import Chunk, is_known, largest_page, values
from trainer.prepare.sources.reading import read_spans

arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

WORDS = "a story of machines that were rented and given back, é漢😀 "


@pytest.fixture(autouse=True, scope="module")
def _small_pages_stand_for_large_ones() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snappy, "_WHOLE_BYTES", -1)
        yield


def chunk_of(path: Path) -> Chunk:
    with parquet.ParquetFile(path) as file:
        return parquet_rows._chunk(file, 0, "text")


def read(path: Path) -> list[str | None]:
    with path.open("rb") as file:
        return [None if value is None else value.read(1 << 40).decode() for value in values(file, chunk_of(path), None)]


def documents(seed: int, count: int, longest: int) -> list[str | None]:
    draw = random.Random(seed)
    long = WORDS * (2 * longest // len(WORDS))
    sizes = [draw.choice([0, 7, 300, longest]) for _ in range(count)]
    noise = "".join(chr(draw.randrange(32, 0x2FFF)) for _ in range(longest))
    starts = [draw.randrange(longest) for _ in range(count)]
    return [None, noise, *(long[start : start + size] for start, size in zip(starts, sizes, strict=True)), None]


@pytest.mark.parametrize("codec", ["none", "zstd", "gzip", "brotli", "snappy"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("has_dictionary", [True, False])
def test_what_was_written_is_read_again(tmp_path: Path, codec: str, version: str, has_dictionary: bool) -> None:
    texts = documents(1, 40, 200_000)
    how = {"compression": codec, "data_page_version": version, "dictionary_pagesize_limit": 1 << 30}
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=has_dictionary, **how)
    assert read(tmp_path / "a.parquet") == texts


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.none() | st.text(max_size=30) | st.sampled_from(["same", "again " * 40]), min_size=1, max_size=90
    ),
    page_bytes=st.sampled_from([1, 200, 1 << 20]),
    limit=st.sampled_from([1, 100, 1 << 20]),
    batch=st.sampled_from([1, 7, 1024]),
    codec=st.sampled_from(["none", "zstd", "snappy"]),
    version=st.sampled_from(["1.0", "2.0"]),
    nullable=st.booleans(),
)
def test_many_pages_with_and_without_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str | None],
    page_bytes: int,
    limit: int,
    batch: int,
    codec: str,
    version: str,
    nullable: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "some.parquet"
    given_texts = texts if nullable else [text or "" for text in texts]
    schema = arrow.schema([arrow.field("text", arrow.string(), nullable=nullable)])
    table = arrow.table({"text": given_texts}, schema=schema)
    how = {"data_page_size": page_bytes, "dictionary_pagesize_limit": limit, "write_batch_size": batch}
    parquet.write_table(table, path, compression=codec, data_page_version=version, **how)
    assert read(path) == given_texts


def test_the_second_chunk_of_a_file_and_of_other_columns_is_found(tmp_path: Path) -> None:
    rows = [{"id": number, "text": f"{number} {WORDS}", "url": None} for number in range(100)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=30)
    with parquet.ParquetFile(tmp_path / "a.parquet") as file, (tmp_path / "a.parquet").open("rb") as raw:
        chunk = parquet_rows._chunk(file, 2, "text")
        assert [value.read(9999).decode() for value in values(raw, chunk, None) if value] == [
            row["text"] for row in rows[60:90]
        ]


def test_a_page_is_as_large_as_its_header_says(tmp_path: Path) -> None:
    texts = [WORDS * 10_000, "short", WORDS * 20_000]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=False)
    with (tmp_path / "a.parquet").open("rb") as file:
        whole = sum(len(text.encode()) for text in texts)
        assert 0 <= largest_page(file, chunk_of(tmp_path / "a.parquet")) - whole < 100


@pytest.mark.parametrize(
    ("how", "known"),
    [
        ({}, True),
        ({"compression": "lz4"}, False),
        ({"use_dictionary": False, "column_encoding": "DELTA_LENGTH_BYTE_ARRAY"}, False),
        ({"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}, False),
    ],
)
def test_what_few_writers_take_is_left_to_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, object], known: bool
) -> None:
    texts = [WORDS * 3, None, "another"]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet", **how)
    with (tmp_path / "a.parquet").open("rb") as file:
        assert is_known(file, chunk_of(tmp_path / "a.parquet")) == known
    monkeypatch.setattr(parquet_rows, "_LARGE_PAGE_BYTES", 0)
    assert [text.text for text in rows_of(tmp_path / "a.parquet")] == [texts[0], texts[2]]


def rows_of(path: Path) -> list[parquet_rows.Text]:
    (file,) = open_source(str(path), "text", lambda _: None, {}).files
    return list(read_spans([Span(file, 0, len(file.weights))], "text"))


# What is damaged


def damaged_somewhere(raw: bytes, end: int) -> Iterator[bytes]:
    draw = random.Random(3)
    for _ in range(300):
        place = draw.randrange(4, end)
        yield raw[:place] + bytes([raw[place] ^ 1 << draw.randrange(8)]) + raw[place + 1 :]


@pytest.mark.parametrize("codec", ["none", "zstd", "snappy", "snappy at once"])
def test_a_damaged_page_is_refused_or_read_and_never_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    if codec == "snappy at once":
        monkeypatch.setattr(snappy, "_WHOLE_BYTES", 1 << 20)
        codec = "snappy"
    path = tmp_path / "a.parquet"
    texts = [None, *("some text"[:size] for size in range(10)), None]
    parquet.write_table(arrow.table({"text": texts}), path, compression=codec, write_statistics=False)
    monkeypatch.setattr(parquet_rows, "_LARGE_PAGE_BYTES", 0)
    whole = path.read_bytes()
    refused = []
    for raw in damaged_somewhere(whole, parquet.read_metadata(path).row_group(0).column(0).total_compressed_size):
        path.write_bytes(raw)
        try:
            rows_of(path)
        except Refusal as refusal:
            refused.append(refusal.code)
    assert len(refused) > 10
    assert set(refused) == {"data.cut_short"}


def test_pages_that_are_written_in_an_unknown_way_are_left_to_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet.write_table(arrow.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(parquet_rows, "_LARGE_PAGE_BYTES", 0)

    def unknown(*_: object) -> int:
        raise EOFError("a field of an unknown kind")

    monkeypatch.setattr(parquet_rows, "largest_page", unknown)
    assert [text.text for text in rows_of(tmp_path / "a.parquet")] == ["one", "two"]


def test_a_header_that_never_ends_is_refused() -> None:
    with pytest.raises(EOFError):
        list(headers.pages(io.BytesIO(b"\x15" + b"\xff" * 99), 0, 1))


# Snappy


def unpacked_by_parts(tmp_path: Path, packed: bytes, size: int) -> bytes:
    (tmp_path / "packed").write_bytes(packed)
    with (tmp_path / "packed").open("rb") as file:
        return Unpacked(snappy.blocks(Part(file.fileno(), 0, len(packed)))).read(size)


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1_000_000])
@pytest.mark.parametrize("is_noise", [True, False])
@pytest.mark.parametrize("whole_bytes", [-1, 65_536, 1 << 20])
def test_snappy_of_any_length_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, is_noise: bool, whole_bytes: int
) -> None:
    monkeypatch.setattr(snappy, "_WHOLE_BYTES", whole_bytes)
    raw = random.Random(size).randbytes(size) if is_noise else (WORDS.encode() * (size // 20 + 1))[:size]
    assert unpacked_by_parts(tmp_path, arrow.compress(raw, "snappy", asbytes=True), size) == raw


def literal(raw: bytes) -> bytes:
    return bytes([62 << 2]) + (len(raw) - 1).to_bytes(3, "little") + raw


@pytest.mark.parametrize("first", [65_536, 70_000, 100])
def test_snappy_that_was_not_packed_by_64_kib_is_unpacked_as_a_whole(tmp_path: Path, first: int) -> None:
    raw = random.Random(0).randbytes(first)
    back = min(first, 60_000)
    copies = [bytes([63 << 2 | 2]) + back.to_bytes(2, "little")] * 1200
    size = first + 64 * len(copies)
    packed = snappy._varint(size) + literal(raw) + b"".join(copies)
    expected = arrow.decompress(packed, size, "snappy", asbytes=True)
    assert unpacked_by_parts(tmp_path, packed, size) == expected


def test_every_codec_is_one_that_pyarrow_writes() -> None:
    assert set(CODECS) - {"UNCOMPRESSED"} <= {"ZSTD", "GZIP", "BROTLI", "SNAPPY"}


# Memory


def test_of_a_page_no_more_is_unpacked_than_was_asked_for(tmp_path: Path) -> None:
    texts = [WORDS * 20_000, "the end"]
    for has_dictionary in (True, False):
        how = {"use_dictionary": has_dictionary, "dictionary_pagesize_limit": 1 << 30}
        parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet", **how)
        with (tmp_path / "a.parquet").open("rb") as file:
            found = values(file, chunk_of(tmp_path / "a.parquet"), tmp_path)
            first = next(found)
            assert first is not None
            assert first.read(10) == texts[0].encode()[:10]
            last = next(found)
            assert last is not None
            assert last.read(99) == b"the end", "what was not read of the first is passed over"
