"""Tests of files as documents: each is read once and whole, wherever the file is divided, or is refused by name."""

from __future__ import annotations

import gzip
import json
import os
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpurun.core.errors import UsageError
from gpurun.data import texts as text_files
from gpurun.data.documents import documents_of
from gpurun.data.kinds import recognise
from gpurun.data.layout import AS_FOUND, Layout
from gpurun.data.source_file import FileSpan, SourceFile
from gpurun.data.sources import open_source
from tests.refusals import refusal
from tests.unit.data.documents import in_parts

PACKS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "frames": lambda raw: b"".join(
        zstandard.ZstdCompressor().compress(raw[i : i + 50]) for i in range(0, len(raw), 50)
    ),
}
END = "<|endoftext|>"


def texts(path: Path, layout: Layout = AS_FOUND) -> list[str]:
    """Return the texts of a source's documents, read as one task."""
    source = open_source(str(path), layout, lambda _: None, val_fraction=0.1, accept_skipped=True)
    ends = [len(file.weights) if file.form == "parquet" else file.text_bytes for file in source.files]
    spans = [FileSpan(file, 0, end) for file, end in zip(source.files, ends, strict=True)]
    return [document.text for document in documents_of(spans, layout)]


def refused(path: Path, code: str, *facts: str, layout: Layout = AS_FOUND) -> None:
    with refusal(UsageError, code, *facts):
        texts(path, layout)


STORY = st.text(alphabet="ab é\n<|", min_size=1, max_size=30).filter(lambda s: s.strip() and END not in s)


@given(st.lists(STORY, min_size=2, max_size=12), st.lists(st.integers(0, 10_000), max_size=6))
@example(["|<|a", "||"], [])
@settings(max_examples=150, deadline=None)
def test_marks_make_the_same_documents_wherever_a_text_is_cut(stories: list[str], cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_text(f"\n{END}\n".join(stories) + f"\n{END}", encoding="utf-8")
        first, *others = path.read_text().split(END)
        expected = [first, *(part.lstrip(" \t").removeprefix("\n") for part in others)]
        assert in_parts(path, cuts) == [part for part in expected if part.strip()]


@pytest.mark.parametrize("mark", ["line", "end of a line", "start of a line", "start and end"])
def test_a_mark_is_no_text_wherever_it_stands(tmp_path: Path, mark: str) -> None:
    stories = [f"Story {i}.\nIt ends.\n" for i in range(40)]
    written = {
        "line": lambda s: f"{s}{END}\n",
        "end of a line": lambda s: f"{s.rstrip()}{END}\n",
        "start of a line": lambda s: f"{END}{s}",
        "start and end": lambda s: f"<|startoftext|>{s}{END}\n",
    }[mark]
    (tmp_path / "a.txt").write_text("".join(map(written, stories)))
    found = texts(tmp_path / "a.txt")
    assert [text.strip() for text in found] == [story.strip() for story in stories]
    assert not any("<|" in text for text in found)


def test_a_mark_within_a_row_parts_it_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"one{END}\ntwo"}) + "\n" + json.dumps({"text": f"3{END}"}))
    assert texts(tmp_path / "a.jsonl") == ["one", "two", "3"]


def test_a_mark_is_found_wherever_the_blocks_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"first{END}second{END}\nthird\n")
    for block in range(1, 40):
        monkeypatch.setattr(text_files, "BLOCK_BYTES", block)
        assert texts(path) == ["first", "second", "third\n"], block


LINE = st.text(alphabet="a é日\n", max_size=40)


@given(st.lists(LINE, min_size=1, max_size=30), st.lists(st.integers(0, 10_000), max_size=5))
@settings(max_examples=150, deadline=None)
def test_no_byte_is_lost_or_read_twice_wherever_a_text_is_cut(lines: list[str], cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        content = "x" + "\n".join(lines)
        path.write_bytes(content.encode())
        (file,) = open_source(str(path), AS_FOUND, lambda _: None, val_fraction=0.1).files
        assert file.form == "pieces"
        places = sorted({0, *(cut % file.text_bytes for cut in cuts), file.text_bytes})
        spans = [FileSpan(file, start, stop) for start, stop in pairwise(places)]
        pieces = [piece for span in spans for piece in text_files.cut_text(span)]
        assert "".join(piece.text for piece in pieces) == content
        assert all(len(piece.text.encode()) <= 4 * file.piece_bytes for piece in pieces)


def test_crlf_is_one_line_end_and_a_byte_order_mark_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n" * 40)
    assert "".join(texts(tmp_path / "a.txt")).startswith("one\ntwo\n")
    assert "\r" not in "".join(texts(tmp_path / "a.txt"))


@pytest.mark.parametrize("pack", PACKS)
def test_json_lines_give_every_row_once_in_every_division(tmp_path: Path, pack: str) -> None:
    rows = [f"row {i} — {'x' * (i % 7)}\n" for i in range(30)]
    raw = "".join(json.dumps({"n": i, "text": row}) + "\n" for i, row in enumerate(rows)).encode()
    (tmp_path / "rows").write_bytes(PACKS[pack](raw))
    for step in (1000, 97, 64, 31):
        assert in_parts(tmp_path / "rows", [*range(0, len(raw), step)]) == rows


def test_rows_are_told_by_what_they_are_not_by_a_name(tmp_path: Path) -> None:
    stories = [f"It was day {i}, and\nit rained." for i in range(5)]
    layouts = {
        "stories.json": json.dumps([{"story": s, "id": i} for i, s in enumerate(stories)], indent=1),
        "lines.txt": "".join(json.dumps({"story": s}) + "\n" for s in stories),
        "table.csv": "id,story\n" + "".join(f'{i},"{s}"\n' for i, s in enumerate(stories)),
        "table.txt": "id\tstory\n" + "".join(f'{i}\t"{s}"\n' for i, s in enumerate(stories)),
    }
    for name, content in layouts.items():
        (tmp_path / name).write_text(content)
        assert texts(tmp_path / name, Layout(column="story")) == stories, name
        refused(tmp_path / name, "data.no_text_column", "story")


@pytest.mark.parametrize(
    "content",
    ["Dear Sir, I am, as ever, yours.\nWell, no.\nYes, sir.\n", "[1] see below\n", "{ well\n", "a,b\nc,d,e\nf\n"],
)
def test_what_only_looks_a_little_like_rows_is_text(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content * 3)
    assert recognise(tmp_path / "a.csv") == ("text", "")


def test_what_is_no_text_is_refused_by_the_name_of_its_kind(tmp_path: Path) -> None:
    contents = {
        "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "llm.c shard": struct.pack("<3i", 20240520, 1, 9) + bytes(2000),
        "llm.c shard of uint32 (Llama 3)": struct.pack("<3i", 20240801, 7, 9) + bytes(2000),
        "PDF": b"%PDF-1.7\n",
        "NumPy array": b"\x93NUMPY" + bytes(100),
        "JSON object": b'{\n "a": {\n  "b": 1\n }\n}\n',
        "binary": b"\x01\x00\x02\x00" * 50,
    }
    for number, (kind, content) in enumerate(contents.items()):
        (tmp_path / str(number)).write_bytes(content)
        refused(tmp_path / str(number), "data.no_text", kind)


def test_a_pointer_among_texts_is_a_file_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A text.\n" * 50)
    (tmp_path / "b.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    refused(tmp_path, "data.no_text", "b.txt", "git-lfs pointer")


def test_a_byte_that_no_text_has_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "nul.txt").write_bytes(b"text " * 4000 + b"\0" + b"more")
    refused(tmp_path / "nul.txt", "data.nul_byte", "nul.txt", "NUL byte at offset 20,000")
    (tmp_path / "latin.txt").write_bytes(b"text " * 4000 + b"\xe9t\xe9")
    refused(tmp_path / "latin.txt", "data.not_utf8", "byte 0xe9 at offset 20000")
    (tmp_path / "wide.txt").write_bytes("wide".encode("utf-16"))
    refused(tmp_path / "wide.txt", "data.not_utf8", "UTF-16")


def test_a_packed_file_with_something_wrong_is_named(tmp_path: Path) -> None:
    raw = "".join(json.dumps({"text": os.urandom(200).hex()}) + "\n" for _ in range(200)).encode()
    for name, packed in (("a.gz", gzip.compress(raw)), ("a.zst", zstandard.ZstdCompressor().compress(raw))):
        (tmp_path / name).write_bytes(packed[: len(packed) // 2])
        refused(tmp_path / name, "data.cut_short", name)
    (tmp_path / "b.gz").write_bytes(gzip.compress(raw) + b"<html>502 Bad Gateway</html>")
    refused(tmp_path / "b.gz", "data.bytes_behind", "b.gz", "gzip")


@pytest.mark.parametrize(
    ("row", "code", "fact"),
    [
        ('{"text": 7}', "data.bad_line", "int under 'text'"),
        ('["no object"]', "data.bad_line", " list"),
        ('{"text": "cut', "data.bad_line", "JSON"),
        ('{"other": "a"}', "data.no_text_column", ": other"),
    ],
)
def test_a_row_with_something_wrong_is_named_with_its_place(tmp_path: Path, row: str, code: str, fact: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": null}\n' + row + "\n")
    refused(tmp_path / "a.jsonl", code, fact)


def test_half_a_surrogate_pair_is_mended_where_it_enters(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert texts(tmp_path / "a.jsonl") == ["a\ufffdb", "😀"]


def test_parquet_gives_every_row_and_url_in_any_string_type(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i}" if i % 5 else None for i in range(40)]
    for kind in (arrow.string(), arrow.large_string(), arrow.dictionary(arrow.int32(), arrow.string())):
        columns = {"text": arrow.array(rows, arrow.string()).cast(kind), "url": [f"http://x/{i}" for i in range(40)]}
        parquet.write_table(arrow.table(columns), tmp_path / "a.parquet", row_group_size=7)
        assert texts(tmp_path / "a.parquet") == [row for row in rows if row]
    (file,) = open_source(str(tmp_path / "a.parquet"), AS_FOUND, lambda _: None, val_fraction=0.1).files
    assert next(documents_of([FileSpan(file, 1, 2)], AS_FOUND)).url == "http://x/7"


def test_a_parquet_column_that_is_not_text_is_refused_by_type(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for kind, value in ((arrow.binary(), b"a"), (arrow.list_(arrow.string()), ["a"]), (arrow.int64(), 1)):
        parquet.write_table(arrow.table({"text": arrow.array([value], kind)}), tmp_path / "a.parquet")
        refused(tmp_path / "a.parquet", "data.no_text_column", str(kind).partition("<")[0])
    parquet.write_table(arrow.table({"story": ["a"]}), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", "data.no_text_column", "story (string)")
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(raw[: len(raw) // 2])
    refused(tmp_path / "a.parquet", "data.cut_short", "a.parquet")


def test_a_folder_holds_a_document_a_text_and_a_document_a_row(tmp_path: Path) -> None:
    for number in range(150):
        (tmp_path / f"{number:03}.txt").write_text(f"Text number {number}.\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    (tmp_path / ".hidden").write_text("hidden\n")
    (tmp_path / "blank.txt").write_text(" \n")
    found = texts(tmp_path)
    assert len(found) == 151
    assert "hidden\n" not in found


def test_links_are_followed_in_the_folder_and_the_hubs_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "data--x" / "blobs", tmp_path / "data--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "00ff").write_text('{"text": "a row of the cache"}\n')
    (snapshot / "part.jsonl").symlink_to("../../blobs/00ff")
    (tmp_path / "outside.txt").write_text("not of it\n")
    (snapshot / "away.txt").symlink_to(tmp_path / "outside.txt")
    assert texts(snapshot) == ["a row of the cache"]


def test_a_folder_mostly_passed_over_is_not_taken_as_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("A few words.\n" * 20)
    (tmp_path / "weights.dat").write_bytes(b"\x00\x01" * 5000)
    with refusal(UsageError, "data.mostly_passed_over", "1 binary") as error:
        open_source(str(tmp_path), AS_FOUND, lambda _: None, val_fraction=0.1)
    assert "--accept-skipped" in error.value.hint
    assert texts(tmp_path), "it goes on where that is accepted"


def test_a_source_that_vanishes_or_changes_half_way_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a text\n" * 100)
    (file,) = open_source(str(path), AS_FOUND, lambda _: None, val_fraction=0.1).files
    path.write_text("another text\n" * 100)
    with refusal(UsageError, "data.changed", "a.txt", "700 bytes", "1,300"):
        list(documents_of([FileSpan(file, 0, file.text_bytes)], AS_FOUND))
    path.unlink()
    with refusal(UsageError, "data.vanished"):
        list(documents_of([FileSpan(file, 0, file.text_bytes)], AS_FOUND))


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a text\n")

    def shut(path: Path) -> tuple[None, str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("gpurun.data.look.recognise", shut)
    refused(tmp_path, "data.unreadable", "a.txt", "Permission denied")


def test_what_waits_of_a_million_files_is_small() -> None:
    root, files = Path("/data"), []
    tracemalloc.start()
    for number in range(10_000):
        files.append(SourceFile(f"{number:09}.txt", root, "whole", number, number, (number,)))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / len(files) < 400
