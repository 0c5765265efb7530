"""Tests of public layouts of corpora: each is read as it was written, or refused with the flag that describes it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import UsageError
from gpurun.data.documents import documents_of
from gpurun.data.layout import AS_FOUND, parse_layout
from gpurun.data.source_file import FileSpan
from tests.unit.data.layouts import opened, refused, texts

STORIES = [f'It was day {number}, and\nit rained; | we "stayed" in.\tTwo,\tthree.' for number in range(60)]


def table(delimiter: str, rows: list[list[str]], **how: Any) -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator="\n", **how).writerows(rows)
    return out.getvalue()


# Tables


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a", "a.csv.gz"])
def test_a_table_is_read_whatever_parts_its_cells(tmp_path: Path, delimiter: str, name: str) -> None:
    content = table(delimiter, [["id", "text"], *([str(n), story] for n, story in enumerate(STORIES))]).encode()
    if name.endswith(".gz"):
        import gzip

        content = gzip.compress(content)
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == STORIES


def test_a_table_as_pandas_writes_it_with_an_index_is_read(tmp_path: Path) -> None:
    rows = [["", "text"], *([str(n), story] for n, story in enumerate(STORIES))]
    (tmp_path / "a.csv").write_text(table(",", rows))
    assert texts(tmp_path / "a.csv") == STORIES


def test_a_table_of_one_column_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(table(",", [["text"], *([story] for story in STORIES)]))
    assert texts(tmp_path / "a.csv") == STORIES
    (tmp_path / "b.csv").write_text("text\none\ntwo, and three\n")
    refused(tmp_path / "b.csv", "data.table_in_doubt", "row 2 has 2 cells", "--delimiter none")
    assert "two, and three" in texts(tmp_path / "b.csv", delimiter="none")[0]


@pytest.mark.parametrize("size", [20_000, 200_000, 3_000_000])
def test_rows_of_a_table_may_be_long(tmp_path: Path, size: int) -> None:
    long = ["a, b\n" * (size // 5), "c" * size, "short"]
    (tmp_path / "a.csv").write_text(table(",", [["id", "text"], *(["1", text] for text in long)]))
    assert texts(tmp_path / "a.csv") == long


def test_a_table_without_a_head_is_refused_until_it_is_said(tmp_path: Path) -> None:
    rows = [[str(n % 5), story] for n, story in enumerate(STORIES)]
    for name in ("reviews.csv", "SMSSpamCollection"):
        (tmp_path / name).write_text(table("\t", rows))
        refused(tmp_path / name, "data.table_in_doubt", "2 cells", "','", "tab", "--no-header")
        refused(tmp_path / name, "data.table_in_doubt", "','", "tab", has_head=False, column="2")
        refused(tmp_path / name, "data.table_in_doubt", "--text-column", has_head=False, delimiter="tab")
        refused(tmp_path / name, "data.no_text_column", ": 1, 2", has_head=False, column="3", delimiter="tab")
        assert texts(tmp_path / name, has_head=False, column="2", delimiter="tab") == STORIES
        assert texts(tmp_path / name, delimiter="none")[0].startswith('0\t"It was day 0')
    (tmp_path / "one.csv").write_text(table(",", [[story] for story in STORIES]))
    refused(tmp_path / "one.csv", "data.table_in_doubt", "--no-header")
    assert texts(tmp_path / "one.csv", has_head=False) == STORIES


def test_a_quote_of_a_table_without_quoting_joins_no_rows(tmp_path: Path) -> None:
    lines = [f"ham\t{chr(34) * (n % 7 == 0)}day {n}" for n in range(60)]
    (tmp_path / "a.tsv").write_text("\n".join(["label\ttext", *lines]) + "\n")
    assert texts(tmp_path / "a.tsv") == [line.partition("\t")[2] for line in lines]


def test_a_row_with_cells_unlike_the_first_is_named_before_work(tmp_path: Path) -> None:
    rows = [["id", "text"], *([str(n), "a"] for n in range(5000)), ["1", "b", "c"]]
    (tmp_path / "a.csv").write_text(table(",", rows))
    refused(tmp_path / "a.csv", "data.table_in_doubt", "row 5001 has 3 cells")
    refused(tmp_path / "a.csv", "data.table_in_doubt", "';'", delimiter=";")
    (tmp_path / "a.csv").rename(tmp_path / "a")
    refused(tmp_path / "a", "data.table_in_doubt", "row 5001 has 3 cells")


def test_a_column_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(table(";", [["stars", "review"], *(["1", story] for story in STORIES)]))
    refused(tmp_path / "a.csv", "data.no_text_column", "stars, review", "--text-column", "--no-header")
    assert texts(tmp_path / "a.csv", column="review") == STORIES
    (tmp_path / "b.csv").write_text(table(",", [["text", "text"], *([story, "other"] for story in STORIES)]))
    refused(tmp_path / "b.csv", "data.table_in_doubt", "first row")


@pytest.mark.parametrize(
    "content",
    [
        "Yes; no.\nWell; no.\nBut; why?\n" * 40,  # no real poem has so many
        "".join(f"import {name} from './{name}';\n" for name in "abcdefgh" * 9),
        "| a | b |\n| - | - |\n" + "| 1 | 2 |\n" * 60,
        "all:\n" + "\techo\n" * 60,
        "Dear Sir, I am, as ever, yours.\nWell, no.\n\nYes, sir.\n" * 40,
    ],
    ids=["poem", "program", "markdown", "makefile", "letter"],
)
def test_a_text_that_looks_like_a_table_stays_text_in_its_folder(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    if content.startswith("Yes"):
        refused(tmp_path / "a.txt", "data.no_text_column", "--delimiter none")
        assert "".join(texts(tmp_path / "a.txt", delimiter="none")) == content
    else:
        assert "".join(texts(tmp_path / "a.txt")) == content


@pytest.mark.parametrize(
    ("flag", "layout"),
    [
        ("--text-column", {"column": "story"}),
        ("--template", {"template": "{a}{b}"}),
        ("--per-line", {"per_line": True}),
    ],
)
def test_a_flag_that_nothing_is_read_by_is_refused(tmp_path: Path, flag: str, layout: dict[str, Any]) -> None:
    if flag == "--per-line":
        (tmp_path / "a").write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES))
    else:
        (tmp_path / "a").write_text("A text.\n" * 50)
    refused(tmp_path / "a", "usage.unused", flag, **layout)


@pytest.mark.parametrize(
    ("layout", "code"),
    [
        ({"template": "{a"}, "usage.template"),
        ({"template": "plain"}, "usage.template"),
        ({"template": "{}"}, "usage.template"),
        ({"template": "{a!r}"}, "usage.template"),
        ({"template": "{a}", "column": "b"}, "usage.template"),
        ({"delimiter": ";;"}, "usage.delimiter"),
        ({"delimiter": '"'}, "usage.delimiter"),
        ({"delimiter": "none", "has_head": False}, "usage.delimiter"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_with_one_that_can(layout: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_layout(**layout)
    assert error.value.code == code


# Rows of several columns, lines, arrays


def test_a_template_joins_columns_in_every_form_of_rows(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"q": f"What, {n}?", "a": f"It is {n}." if n else "", "n": "no text"} for n in range(60)]
    expected = [f"Q: {row['q']}\nA: {row['a']} {{}}" for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text(table(",", [["q", "a", "n"], *([*row.values()] for row in rows)]))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet"):
        assert texts(tmp_path / name, template=r"Q: {q}\nA: {a} {{}}") == expected, name
        refused(tmp_path / name, "data.no_text_column", "'b'", template="{a}{b}")


def test_each_line_of_a_text_is_a_document(tmp_path: Path) -> None:
    names = [f"name {n}" for n in range(200)]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n\n \n")
    assert texts(tmp_path / "names.txt", per_line=True) == [f"{name}\n" for name in names]
    (file,) = opened(tmp_path / "names.txt", per_line=True).files
    cuts = range(0, file.text_bytes + 50, 37)
    spans = [FileSpan(file, start, min(start + 37, file.text_bytes)) for start in cuts if start < file.text_bytes]
    assert [one.text for one in documents_of(spans, AS_FOUND)] == [f"{name}\n" for name in names]


def test_an_array_of_strings_is_rows_and_one_of_arrays_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(STORIES, indent=1))
    assert texts(tmp_path / "a.json") == STORIES
    refused(tmp_path / "a.json", "usage.unused", "--text-column", column="text")
    (tmp_path / "b.json").write_text(json.dumps([[story, 1] for story in STORIES]))
    refused(tmp_path / "b.json", "data.no_text", "JSON", "jq -c '.[] | {text: .[0]}'")
    (tmp_path / "c.json").write_text(json.dumps([*STORIES, 5]))
    refused(tmp_path / "c.json", "data.bad_line", "it is int")
    for text in ('["Yes," he said.\n', "[1] see below\n", "[[link]] of a wiki\n", "[x] done\n"):
        (tmp_path / "d.txt").write_text(text * 40)
        assert "".join(texts(tmp_path / "d.txt")) == text * 40


# Folders


def test_json_without_texts_among_others_is_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.ts").write_text("export const a = 1;\n" * 100)
    (tmp_path / "tsconfig.json").write_text('{"compilerOptions": {"strict": true}}\n')
    (tmp_path / "list.json").write_text('[{"id": 1}, {"id": 2}]')
    (tmp_path / "prices.csv").write_text("id,price\n1,2\n3,4\n")
    source = opened(tmp_path)
    assert source.passed_over == {"JSON without 'text'": 2, "table without 'text'": 1}
    assert [file.name for file in source.files] == ["a.ts"]
    refused(tmp_path / "tsconfig.json", "data.no_text_column", "compilerOptions")
    (tmp_path / "a.ts").unlink()
    refused(tmp_path, "data.no_text_column", "list.json", ": id")


def test_globs_choose_files_and_one_that_fits_none_is_refused(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "deep/c.py", "deep/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n" * 50)
    source = opened(tmp_path, include=("*.py",), exclude=("b.*",))
    assert [file.name for file in source.files] == ["a.py", "deep/c.py"]
    assert source.passed_over == {"not included": 1, "excluded": 1}
    refused(tmp_path, "usage.include", "'*.rs'", "4 files", include=("*.py", "*.rs"))
    refused(tmp_path, "usage.exclude", "'/d.txt'", exclude=("/d.txt",))
