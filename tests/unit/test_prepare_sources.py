"""Documents stream from every kind of file, the same ones however it is divided; what is wrong is said in words."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.prepare.corpora.division import divide
from trainer.prepare.errors import Refusal
from trainer.prepare.sources import lines as json_lines
from trainer.prepare.sources import parquet as parquet_rows
from trainer.prepare.sources import plain
from trainer.prepare.sources.files import SourceFile, Span
from trainer.prepare.sources.long_lines import string_pieces
from trainer.prepare.sources.opening import Source, open_source
from trainer.prepare.sources.reading import read_spans

SEPARATOR = b"<|endoftext|>"
ROWS = [
    {"text": f"Row {i}: " + "wörds and more words. " * (i % 9), "url": f"https://example.org/{i}"} for i in range(300)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def opened(source: Path | str, column: str = "text") -> Source:
    return open_source(str(source), column, lambda _: None)


def read(source: Path | str, shard_tokens: int = 1000, column: str = "text") -> list[str]:
    """Every document of a source, by way of its division."""
    return [t.text for task in divide(opened(source, column).files, shard_tokens) for t in read_spans(task, column)]


def refusal(act: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as raised:
        act()
    assert raised.value.hint
    return raised.value


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def text_file(path: Path, content: bytes, form: str) -> SourceFile:
    path.write_bytes(content)
    about = path.stat()
    return SourceFile(path.name, path.parent, form, about.st_size, about.st_mtime_ns, (len(content),))  # type: ignore[arg-type]


@pytest.mark.parametrize("pack", [lambda raw: raw, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
def test_json_lines_give_every_row_once_in_every_division(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    suffix = {b"\x1f\x8b": ".gz", b"\x28\xb5": ".zst"}.get(pack(LINES)[:2], "")
    path = written(tmp_path / f"rows.jsonl{suffix}", pack(LINES))
    for shard_tokens in (100, 777, 100_000):
        assert read(path, shard_tokens) == [row["text"] for row in ROWS]


def test_frames_of_zstd_and_members_of_gzip_follow_one_another(tmp_path: Path) -> None:
    for suffix, pack in ((".zst", zstandard.compress), (".gz", gzip.compress)):
        half = LINES.index(b"\n", len(LINES) // 2) + 1
        path = written(tmp_path / f"rows.jsonl{suffix}", pack(LINES[:half]) + pack(LINES[half:]))
        assert len(read(path)) == len(ROWS)


def test_parquet_gives_every_row_and_its_url(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist([*ROWS[:100], {"text": None, "url": None}, *ROWS[100:]])
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=64)
    (file,) = opened(tmp_path).files
    assert len(file.weights) == 5
    assert read(tmp_path, 500) == [row["text"] for row in ROWS]
    texts = list(read_spans(divide([file], 10**9)[0], "text"))
    assert [t.url for t in texts] == [row["url"] for row in ROWS]
    assert len({t.name for t in texts}) == len(texts)


@pytest.mark.parametrize("large", [False, True], ids=["whole pages", "pages in parts"])
def test_an_address_in_parquet_that_is_not_utf8_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet_rows, "_LARGE_PAGE_BYTES", 100 if large else 16 << 20)
    raw = arrow.array([b"https://a.org/\xff", None, b"https://b.org"], arrow.binary())
    urls = arrow.Array.from_buffers(arrow.string(), 3, raw.buffers())
    table = arrow.table({"text": [row["text"] * 9 for row in ROWS[:3]], "url": urls})
    parquet.write_table(table, tmp_path / "rows.parquet", use_dictionary=False)
    texts = [text for task in divide(opened(tmp_path).files) for text in read_spans(task, "text")]
    assert [text.url for text in texts] == ["https://a.org/\ufffd", "", "https://b.org"]


@pytest.mark.parametrize("most", [1000, 1 << 20], ids=["a long line", "a short line"])
@pytest.mark.parametrize(
    ("row", "url"),
    [
        ({"url": 'https://a.org/"é"', "text": "LONG"}, 'https://a.org/"é"'),
        ({"text": "LONG", "meta": {"url": "https://inner.org"}, "url": "https://late.org"}, "https://late.org"),
        ({"text": "LONG", "meta": {"url": "https://inner.org"}}, ""),
        ({"url": None, "text": "LONG"}, ""),
        ({"url": ["https://a.org"], "text": "LONG"}, ""),
    ],
)
def test_a_line_has_its_address_however_long_it_is_and_wherever_that_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, row: dict[str, Any], url: str
) -> None:
    monkeypatch.setattr(json_lines, "PIECE_BYTES", most)
    path = written(tmp_path / "a.jsonl", json.dumps(row).replace("LONG", "word " * 1000).encode())
    texts = [text for task in divide(opened(path).files) for text in read_spans(task, "text")]
    assert "".join(text.text for text in texts) == "word " * 1000
    assert len(texts) == (5 if most == 1000 else 1)
    assert "".join(text.url for text in texts) == url


def test_a_folder_holds_a_document_a_text_and_a_document_a_row(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n")
    written(tmp_path / "b.jsonl", LINES)
    written(tmp_path / "c.bin", b"\0\1\2")
    written(tmp_path / "d.txt", b"")
    found = opened(tmp_path)
    assert found.skipped == {"binary": 1, "empty": 1}
    assert read(tmp_path) == ["one\ntwo\n", *(row["text"] for row in ROWS)]


@pytest.mark.parametrize(("name", "pack"), [("A.JSONL", bytes), ("a.Jsonl.GZ", gzip.compress)])
def test_a_name_in_capitals_is_the_same_name(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    assert read(written(tmp_path / name, pack(LINES))) == [row["text"] for row in ROWS]


def test_what_waits_of_a_million_files_is_small(tmp_path: Path) -> None:
    for number in range(3):
        written(tmp_path / f"a-file-of-a-million-{number:06}.txt", b"words\n")
    (task,) = divide(opened(tmp_path).files)
    assert len({id(span.file.root) for span in task}) == 1
    for span in task:
        assert _own_bytes(span) + _own_bytes(span.file) < 450


def _own_bytes(record: Span | SourceFile) -> int:
    """What a record takes with its values, but for those that it shares with others."""
    assert not hasattr(record, "__dict__")
    values = [getattr(record, field.name) for field in fields(record) if field.name not in ("root", "form", "file")]
    values += [weight for value in values if isinstance(value, tuple) for weight in value]
    return sum(map(sys.getsizeof, [record, *values]))


def test_separator_lines_part_the_documents_of_a_text(tmp_path: Path) -> None:
    stories = [f"Story {i}.\nIt goes on.\n" * (1 + i % 5) for i in range(200)]
    path = written(tmp_path / "stories.txt", "<|endoftext|>\n".join(stories).encode())
    for shard_tokens in (50, 333, 10**6):
        assert read(path, shard_tokens) == stories


@pytest.mark.parametrize("pack", [lambda raw: raw, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
def test_separators_count_however_late_the_first_one_comes(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    suffix = {b"\x1f\x8b": ".gz", b"\x28\xb5": ".zst"}.get(pack(LINES)[:2], "")
    books = [f"Book {i}.\nIt goes on.\n" * 40_000 for i in range(2)]
    path = written(tmp_path / f"books.txt{suffix}", pack("<|endoftext|>\n".join(books).encode()))
    for source in (path, tmp_path):
        (file,) = opened(source).files
        assert (file.form, file.weights) == ("separated", (sum(map(len, books)) + 14,))
    assert read(path, 10**6) == books


@pytest.mark.parametrize("second", [b"A second.\r\n<|endoftext|>\r\n", b""], ids=["more", "alone"])
def test_a_separator_behind_a_byte_order_mark_is_no_text(tmp_path: Path, second: bytes) -> None:
    path = written(tmp_path / "stories.txt", b"\xef\xbb\xbf<|endoftext|>\r\n" + second + b"The last.\r\n")
    for shard_tokens in (2, 10**6):
        assert read(path, shard_tokens) == [*(["A second.\n"] if second else []), "The last.\n"]


def test_json_lines_behind_a_byte_order_mark_are_rows(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.json", b"\xef\xbb\xbf" + b'{"text": "x"}\n{"text": "y"}\n')) == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", b"caf\xe9"), ("a.txt", "Unicode".encode("utf-16")), ("a.json", b'[{"text": "x"}]')],
    ids=["latin1", "utf-16", "array"],
)
def test_a_command_that_is_advised_takes_a_name_as_it_is(tmp_path: Path, name: str, content: bytes) -> None:
    """Typed as it stood it took another file, or ran what the name says."""
    path = written(tmp_path / f"my $(touch gone); {name}", content)
    hint = refusal(lambda: read(path)).hint
    words = shlex.split(hint.partition(": ")[2])
    assert path.name in words
    assert not [word for word in words if "touch" in word and "my $(touch gone); a" not in word]


def packed_wide(raw: bytes) -> bytes:
    """Zstd as --long=30 makes it of a stream."""
    packer = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=30))
    stream = packer.compressobj()
    return stream.compress(raw) + stream.flush()


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from([SEPARATOR, b" <|endoftext|>\r", b"x<|endoftext|>", b"<|endoftext|>x", b"", b"words"])
    ),
    size=st.integers(16, 40),
)
def test_a_separator_is_found_wherever_the_blocks_end(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int
) -> None:
    path = written(tmp_path_factory.mktemp("look") / "text.txt", b"\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "_LOOK_BYTES", size)
        found = plain.look_through(path)
    assert found == (path.stat().st_size, any(line.strip() == SEPARATOR for line in lines))


@settings(max_examples=80, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from(["a", "ü" * 20, "longer than the others, by far " * 9, "", "\U0001f600" * 33]), max_size=60
    ),
    cuts=st.sets(st.integers(0, 4000), max_size=6),
    ends=st.booleans(),
)
def test_no_byte_of_a_text_is_lost_or_read_twice_wherever_it_is_divided(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cuts: set[int], ends: bool
) -> None:
    content = ("\n".join(lines) + ("\n" if ends else "")).encode()
    before, plain.BLOCK_BYTES = plain.BLOCK_BYTES, 100
    try:
        file = text_file(tmp_path_factory.mktemp("cut") / "text.txt", content, "blocks")
        places = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
        spans = [Span(file, start, stop) for start, stop in pairwise(places)]
        texts = [text.text for text in read_spans(spans, "text")]
    finally:
        plain.BLOCK_BYTES = before
    assert "".join(texts) == content.decode()
    assert max(map(len, texts), default=0) <= 300


@pytest.mark.parametrize("form", ["blocks", "separated", "whole"])
def test_a_line_end_of_two_characters_is_one_wherever_a_text_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(plain, "BLOCK_BYTES", 100)
    monkeypatch.setattr(plain, "PIECE_BYTES", 100)
    for length in range(90, 210):
        file = text_file(tmp_path / "text.txt", b"x" * length + b"\r\nend\r", form)
        texts = [text.text for text in read_spans([Span(file, 0, length + 6)], "text")]
        assert "".join(texts) == "x" * length + "\nend\r"


def joined(source: Path) -> list[str]:
    """Every document, its pieces put together; none of them may be long."""
    found: list[str] = []
    for task in divide(opened(source).files, 10**9):
        for text in read_spans(task, "text"):
            assert len(text.text) <= 2000
            found = [*found[:-1], found[-1] + text.text] if text.continues else [*found, text.text]
    return found


def test_a_document_larger_than_may_be_in_memory_comes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for module in (plain, json_lines, parquet_rows):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    story = 'wörd \U0001f600 "said" \\ ' * 300
    for name, raw in (("ascii", True), ("utf-8", False)):
        rows = [{"id": {"text": 1}, "text": story}, {"text": "short"}, {"text": story[5:], "url": "late"}]
        content = "".join(json.dumps(row, ensure_ascii=raw) + "\n" for row in rows).encode()
        path = written(tmp_path / f"{name}.jsonl", content)
        assert joined(path) == [story, "short", story[5:]]
    path = written(tmp_path / "long.txt", f"begin\n<|endoftext|>\n{story}\n<|endoftext|>\nend".encode())
    assert joined(path) == ["begin\n", f"{story}\n", "end"]
    (tmp_path / "folder").mkdir()
    written(tmp_path / "folder" / "whole.txt", story.encode())
    assert joined(tmp_path / "folder") == [story]
    parquet.write_table(arrow.table({"text": [story, None, "short"]}), tmp_path / "rows.parquet")
    assert joined(tmp_path / "rows.parquet") == [story, "short"]


def test_a_long_text_is_cut_at_the_same_places_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for module in (json_lines, parquet_rows):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    story = 'wörd \U0001f600 "said" \\ ' * 300
    rows = [{"id": "x" * length, "text": story} for length in (0, 1, 7, 940, 2000)]
    for name, ascii_only in (("a.jsonl", True), ("b.jsonl", False)):
        content = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
        written(tmp_path / name, content.encode())
    parquet.write_table(arrow.table({"text": [story]}), tmp_path / "c.parquet")
    pieces: dict[str, list[str]] = {}
    for task in divide(opened(tmp_path).files, 10**9):
        for text in read_spans(task, "text"):
            pieces.setdefault(text.name, []).append(text.text)
    assert len(pieces) == 11
    assert len({tuple(texts) for texts in pieces.values()}) == 1


@pytest.mark.parametrize("most", [1000, 1 << 20], ids=["a long line", "a short line"])
def test_half_a_surrogate_pair_is_mended_where_it_enters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(json_lines, "PIECE_BYTES", most)
    row = json.dumps({"text": "half \ud83d of a pair, " * 100, "url": "https://example.org/\ud83d"})
    path = written(tmp_path / "a.jsonl", row.encode())
    texts = [text for task in divide(opened(path).files) for text in read_spans(task, "text")]
    assert "".join(text.text for text in texts) == "half \ufffd of a pair, " * 100
    assert texts[-1].url == "https://example.org/\ufffd"


@pytest.mark.parametrize(
    ("row", "code", "said"),
    [
        ('{"body": "LONG", "id": 7}', "data.no_text_column", "body, id"),
        ('{"text": 7, "body": "LONG"}', "data.bad_line", "no text"),
        ('{"text": "LONG \x01"}', "data.bad_line", "not JSON"),
        ('{"text": "LONG \\q"}', "data.bad_line", "not JSON"),
        ('{"text": "LONG', "data.bad_line", "no end"),
    ],
)
def test_a_long_line_with_something_wrong_is_refused_like_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, code: str, said: str
) -> None:
    monkeypatch.setattr(json_lines, "PIECE_BYTES", 1000)
    path = written(tmp_path / "a.jsonl", row.replace("LONG", "word " * 1000).encode())
    found = refusal(lambda: read(path))
    assert (found.code, said in found.message) == (code, True)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from('a\\"\n é\U0001f600\ud83d\ude00u{:,')),
    before=st.sampled_from([1, None, 'x"y', [1, {"text": "no"}], {"text": "inner"}]),
    size=st.integers(1, 9),
    plain_ascii=st.booleans(),
)
def test_the_pieces_of_a_long_line_are_what_json_makes_of_the_whole(
    text: str, before: object, size: int, plain_ascii: bool
) -> None:
    mended = text if plain_ascii else text.encode("utf-8", "replace").decode()
    raw = json.dumps({"id": before, "text": mended, "z": {"text": []}}, ensure_ascii=plain_ascii).encode()
    chunks = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert "".join(string_pieces(chunks, "text")) == json.loads(raw)["text"]


@pytest.mark.parametrize(
    ("name", "content", "code", "said"),
    [
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "data.no_text_column", "body, id"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "data.bad_line", "offset 14"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "data.bad_line", "offset 14"),
        ("a.jsonl", b"[1]\n", "data.bad_line", "list"),
        ("a.jsonl", b'{"text": "x"}\n' + b"[" * 100_000 + b"\n", "data.bad_line", "offset 14"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "data.not_utf8", "offset 0"),
        ("a.txt", b"abc\ncaf\xe9\n", "data.not_utf8", "0xe9 at offset 7"),
        ("a.txt", "Notepad's Unicode\r\n".encode("utf-16"), "data.not_utf8", "UTF-16"),
        ("a.jsonl", '{"text": "\u8bcd"}\r\n'.encode("utf-16"), "data.not_utf8", "UTF-16"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-400], "data.cut_short", "bytes are there"),
        ("a.jsonl.gz", b"no gzip at all", "data.cut_short", "bytes are there"),
        ("a.jsonl.zst", zstandard.compress(LINES)[:-200], "data.cut_short", "no end"),
        ("a.jsonl.zst", b"no zstd at all", "data.cut_short", "bytes are there"),
        ("a.jsonl.zst", packed_wide(LINES), "data.window_too_large", "zstd --long"),
        ("a.json", b' [\n  {"id": 1, "text": "x"}\n]\n', "data.json_array", "one JSON array"),
        ("a.json.gz", gzip.compress(b'[{"text": "x"}]', mtime=0), "data.json_array", "one JSON array"),
        ("a.json", b'\xef\xbb\xbf[{"text": "x"}]', "data.json_array", "one JSON array"),
        ("a.parquet", b"PAR1 and then nothing", "data.cut_short", "21 bytes"),
        ("a.txt", b"", "data.empty", "1 empty"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else value,
)
def test_a_file_with_something_wrong_is_refused_with_what_and_where(
    tmp_path: Path, name: str, content: bytes, code: str, said: str
) -> None:
    path = written(tmp_path / name, content)
    found = refusal(lambda: read(path))
    assert found.code == code
    assert said in found.message
    assert str(path) in found.message


@pytest.mark.parametrize("pack", [lambda raw: raw, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("end", [b"\xe9 noir", b"\xe9", b"\xe2\x82"], ids=["within", "last", "half a character"])
@pytest.mark.parametrize("before", [b"<|endoftext|>\n", b""], ids=["separated", "one text"])
def test_a_text_that_is_not_utf8_somewhere_is_refused_before_any_work(
    tmp_path: Path, before: bytes, end: bytes, pack: Callable[[bytes], bytes]
) -> None:
    """It was found when its turn came, and the mended file was another source: what was finished was of no use."""
    good = before + "caf\u00e9 \u20ac ".encode() * 100_000
    written(tmp_path / "a.txt", good)
    path = written(tmp_path / ("b.txt" if pack(b"") == b"" else "b.txt.gz"), pack(good + end))
    found = refusal(lambda: opened(tmp_path))
    assert found.code == "data.not_utf8"
    assert found.message == f"{path} is not UTF-8: byte 0x{end[0]:02x} at offset {len(good)}."


@pytest.mark.parametrize("content", ['[{"name": "x"}]\n', '["text", "of", "words"]\n', "[1, 2]\n"])
def test_json_that_holds_no_documents_is_a_text_like_any_other(tmp_path: Path, content: str) -> None:
    assert read(written(tmp_path / "a.json", content.encode())) == [content]


def test_parquet_without_a_text_column_lists_those_that_it_has(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"content": ["x"], "score": [0.5]}), tmp_path / "a.parquet")
    found = refusal(lambda: opened(tmp_path / "a.parquet"))
    assert found.code == "data.no_text_column"
    assert "content (string), score (double)" in found.message
    assert read(tmp_path / "a.parquet", column="content") == ["x"]
    assert refusal(lambda: opened(tmp_path / "a.parquet", "score")).code == "data.no_text_column"


@pytest.mark.parametrize("form", ["a short line", "a long line", "columns"])
def test_of_very_many_names_the_first_are_told(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary is an object, too: to list its keys would fill the screen, and to collect them the memory."""
    names = [f"token {number:06d}" + "!" * (100 * (number == 1)) for number in range(50_000)]
    path = tmp_path / ("a.parquet" if form == "columns" else "vocab.json")
    if form == "columns":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({name: [1] for name in names[:1000]}), path)
    else:
        monkeypatch.setattr(json_lines, "PIECE_BYTES", 1000 if form == "a long line" else 4 << 20)
        path.write_text(json.dumps(dict.fromkeys(names, 1)))
    found = refusal(lambda: read(path))
    assert found.code == "data.no_text_column"
    assert "token 000000" in found.message
    assert found.message.endswith(", ….")
    assert len(found.message) < 1000 + len(str(path))


_HELD_BYTES = """
import sys
from trainer.prepare.sources.files import Span
from trainer.prepare.sources.opening import open_source
from trainer.prepare.sources.reading import read_spans
from tests.memory import tree_bytes
import os
(file,) = open_source(sys.argv[1], "text", lambda _: None, {}).files
before = tree_bytes(os.getpid())
read = sum(len(text.text) for text in read_spans([Span(file, 0, 1)], "text"))
print(read, tree_bytes(os.getpid()) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is told by /proc")
def test_what_a_large_page_of_parquet_took_is_given_back(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    documents = ["a long story " * 3_000_000, "another one. " * 3_000_000]
    how = {"use_dictionary": False, "data_page_size": 1 << 30}
    parquet.write_table(arrow.table({"text": documents}), tmp_path / "two.parquet", **how)
    command = [sys.executable, "-c", _HELD_BYTES, str(tmp_path / "two.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    read, held_bytes = map(int, done.stdout.split())
    assert read == sum(map(len, documents))
    assert held_bytes < read / 10, "pyarrow's own allocator keeps all of it"


@pytest.fixture
def large_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Span, list[str]]:
    """A row group that counts as one with a large page, and its documents."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([*ROWS, {"text": None, "url": None}]), tmp_path / "a.parquet")
    (file,) = opened(tmp_path / "a.parquet").files
    monkeypatch.setattr(parquet_rows, "_LARGE_PAGE_BYTES", 100)
    monkeypatch.setattr(parquet_rows, "_BATCH_BYTES", 1000)
    return Span(file, 0, 1), [row["text"] for row in ROWS]


def test_a_large_page_of_parquet_is_read_in_parts_and_gives_the_same_documents(
    tmp_path: Path, large_page: tuple[Span, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    span, documents = large_page
    folder = tmp_path / "unpacking"
    found = list(read_spans([span], "text", folder))
    assert [text.text for text in found] == documents
    assert list(folder.iterdir()) == [], "its dictionary was there, without a name"
    monkeypatch.setattr(parquet_rows, "_LARGE_PAGE_BYTES", 1 << 30)
    assert found == list(read_spans([span], "text")), "names and addresses too"


def test_a_disk_that_is_full_while_a_page_is_unpacked_is_not_taken_for_a_damaged_file(
    tmp_path: Path, large_page: tuple[Span, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_full_disk(*, dir: Path, buffering: int) -> BinaryIO:
        return open("/dev/full", "wb", buffering=buffering)

    monkeypatch.setattr("tempfile.TemporaryFile", on_full_disk)
    with pytest.raises(OSError, match="No space left") as full:
        list(read_spans([large_page[0]], "text", tmp_path / "unpacking"))
    assert full.value.errno == errno.ENOSPC


@pytest.mark.parametrize("large_bytes", [0, 1 << 30])
def test_a_document_that_ends_in_half_a_character_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_bytes: int
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    raw = arrow.array([b"half \xe2\x82", b"the next"], arrow.binary())
    column = arrow.StringArray.from_buffers(len(raw), *raw.buffers()[1:])
    parquet.write_table(arrow.table({"text": column}), tmp_path / "a.parquet")
    (file,) = opened(tmp_path / "a.parquet").files
    monkeypatch.setattr(parquet_rows, "_LARGE_PAGE_BYTES", large_bytes)
    found = list(islice(read_spans([Span(file, 0, 1)], "text"), 9))
    assert [text.text for text in found] == ["half \ufffd", "the next"]


def test_a_parquet_file_cut_short_is_named(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-100])
    assert refusal(lambda: opened(tmp_path)).code == "data.cut_short"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_with_one_unreadable_file_is_refused_before_any_work(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", b"fine")
    written(tmp_path / "b.txt", b"secret").chmod(0)
    found = refusal(lambda: opened(tmp_path))
    assert (found.code, "b.txt" in found.message) == ("data.unreadable", True)


def test_a_file_that_the_system_will_not_open_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a.txt", b"fine")
    secret = written(tmp_path / "b.txt", b"secret")
    real = open

    def guarded(path: object, *rest: object, **more: object) -> object:
        if path == secret:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **more)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", guarded)
    found = refusal(lambda: opened(tmp_path))
    assert (found.code, "b.txt" in found.message) == ("data.unreadable", True)


def test_a_source_that_vanishes_or_changes_half_way_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", LINES)
    (task,) = divide(opened(path).files, 10**6)
    texts = read_spans(task, "text")
    next(texts)
    path.write_bytes(LINES + b'{"text": "one more"}\n')
    assert refusal(lambda: list(texts)).code == "data.changed"
    path.unlink()
    gone = refusal(lambda: list(read_spans(task, "text")))
    assert (gone.code, "cp -p" in gone.hint) == ("data.vanished", True), "by another time it is another source"
