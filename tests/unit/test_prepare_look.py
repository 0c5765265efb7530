"""What is wrong with a row is found before anything is made, once, and nothing is lost with it."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.prepare import tokenizers
from trainer.prepare.corpora import division, look, pipeline
from trainer.prepare.corpora.executors import Executor
from trainer.prepare.corpora.meter import Meter
from trainer.prepare.corpora.pipeline import Order, prepare_corpus
from trainer.prepare.dedupe.signatures import Dedupe
from trainer.prepare.errors import Refusal
from trainer.prepare.sources.opening import open_source

WORDS = "the quick brown fox jumps over a lazy dog while she sells sea shells — by the sea shore\n"
ROWS = [{"text": f"Document {i}\n" + WORDS * (i % 33)} for i in range(300)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_from_tiktoken", lambda: None)
    monkeypatch.setattr(division, "_LEAST_BYTES", 1)


def prepared(source: Path, out: Path, progress: Callable[[dict[str, int]], None] = lambda _: None, **more: Any) -> None:
    settings = {"tokenizer": "gpt2", "val_fraction": 0.05, "shard_tokens": 20_000, "workers": 2, **more}
    prepare_corpus(Order(source=str(source), out=out, **settings), lambda _: None, progress)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def parquet(path: Path) -> bytes:
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.Table.from_pylist(ROWS), path, row_group_size=20, compression="gzip")
    return path.read_bytes()


def damaged_page(path: Path) -> bytes:
    """The same with noise in the pages of a row group behind the middle; the end of the file is as it was."""
    raw = parquet(path)
    group = pytest.importorskip("pyarrow.parquet").read_metadata(path).row_group(8).column(0)
    place, size = group.dictionary_page_offset + 40, group.total_compressed_size - 40
    return raw[:place] + random.Random(1).randbytes(size) + raw[place + size :]


WRONG = {
    "no JSON": ("rows.jsonl", lambda _: LINES + b"no object\n", lambda _: LINES, "data.bad_line"),
    "no text column": ("rows.jsonl", lambda _: LINES + b'{"txt": "a"}\n', lambda _: LINES, "data.no_text_column"),
    "no string": ("rows.jsonl", lambda _: LINES + b'{"text": 1}\n', lambda _: LINES, "data.bad_line"),
    "not UTF-8": ("rows.jsonl", lambda _: LINES + b'{"text": "caf\xe9"}\n', lambda _: LINES, "data.not_utf8"),
    "packed": (
        "rows.jsonl.gz",
        lambda _: gzip.compress(LINES + b"no object\n"),
        lambda _: gzip.compress(LINES),
        "data.bad_line",
    ),
    "a page": ("rows.parquet", damaged_page, parquet, "data.cut_short"),
}


@pytest.mark.slow
@pytest.mark.parametrize("dedupe", [None, Dedupe(("exact",))], ids=["all", "dedupe"])
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_far_behind_is_refused_before_any_shard_and_mending_it_is_enough(
    what: str, dedupe: Dedupe | None, tmp_path: Path
) -> None:
    name, wrong, right, code = WRONG[what]
    source, out = tmp_path / name, tmp_path / "out"
    source.write_bytes(wrong(source))
    assert len(division.divide(open_source(str(source), "text", lambda _: None).files, 20_000)) > 8
    figures: list[dict[str, int]] = []
    with pytest.raises(Refusal) as raised:
        prepared(source, out, figures.append, dedupe=dedupe, workers=1)
    assert raised.value.code == code
    assert not figures[-1]["tasks"]
    assert {path.name for path in out.iterdir()} <= {"prepare.json", "vocab.json", ".unpacking"}
    source.write_bytes(right(source))
    prepared(source, out, dedupe=dedupe)
    prepared(source, tmp_path / "straight", dedupe=dedupe)
    assert content(out) == content(tmp_path / "straight")
    assert {path.name for path in out.iterdir() if path.suffix != ".bin"} == {"data.json", "vocab.json"}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    return tmp_path / "rows.jsonl"


def stopped(rows: Path, out: Path, when: Callable[[dict[str, int]], object]) -> None:
    def stop(figures: dict[str, int]) -> None:
        if when(figures):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(rows, out, stop)


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tasks that are looked at, of each look from now on."""
    found: list[int] = []
    real = look.look_at_rows
    monkeypatch.setattr(pipeline, "look_at_rows", lambda rows, *more: (found.append(len(rows)), real(rows, *more))[1])
    return found


def test_one_that_goes_on_does_not_look_again(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(rows, tmp_path / "out", lambda figures: figures["tasks"] >= 2)
    found, told = looks(monkeypatch), list[dict[str, int]]()
    prepared(rows, tmp_path / "out", told.append)
    assert not found
    assert told[-1]["total_bytes"] == len(LINES), "the look is no part of what is left"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "half written", "another column"])
def test_a_look_that_was_not_ended_is_made_again(
    how: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, mark = tmp_path / "out", tmp_path / "out" / "looked.json"
    stopped(rows, out, lambda figures: figures["tasks"] or (how == "killed" and figures["done_bytes"]))
    if how == "killed":
        assert not mark.exists()
    else:
        mark.write_text(mark.read_text()[:9] if how == "half written" else mark.read_text().replace("text", "url"))
    found = looks(monkeypatch)
    prepared(rows, out)
    assert len(found) == 1


def test_where_characters_are_counted_nothing_is_read_once_more(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = looks(monkeypatch)
    prepared(rows, tmp_path / "out", tokenizer="char")
    assert not found
    with rows.open("ab") as file:
        file.write(b"no object\n")
    with pytest.raises(Refusal, match="is not JSON"):
        prepared(rows, tmp_path / "other", tokenizer="char")
    assert not list((tmp_path / "other").glob("t*"))


def test_texts_are_looked_through_as_they_are_opened_and_packed_rows_once(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(WORDS * 1000)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (folder / "c.jsonl").write_bytes(LINES)
    tasks = division.divide(open_source(str(folder), "text", lambda _: None).files, 20_000)
    spans = [span for task in look.rows_of(tasks) for span in task]
    assert len([span for span in spans if span.file.name == "c.jsonl"]) > 4
    assert [(span.start, span.stop) for span in spans if span.file.name == "b.jsonl.gz"] == [(0, len(LINES))]
    assert {span.file.name for span in spans} == {"b.jsonl.gz", "c.jsonl"}
    assert sum(span.text_bytes for span in spans) == 2 * len(LINES)


@pytest.mark.parametrize("first", [True, False], ids=["two wrong", "one wrong"])
def test_of_two_things_the_one_that_stands_first_is_told_whichever_was_found_first(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [Refusal(f"test.{place}", "It is wrong.", hint="Mend it.") for place in range(3)]
    found = [(2, wrong[2]), (0, None), (1, wrong[1] if first else None), (3, None)]
    monkeypatch.setattr(look, "work_through", lambda *_: iter(found))
    executor, looking = Executor("processes", 2, "text", tmp_path), Meter(4, lambda _: None).add_pass([()] * 4)
    with pytest.raises(Refusal) as raised:
        look.look_at_rows([()] * 4, executor, looking, lambda _: None)
    assert raised.value.code == ("test.1" if first else "test.2")


@pytest.mark.slow
def test_the_time_that_is_left_is_not_judged_by_the_look_alone(rows: Path, tmp_path: Path) -> None:
    """A byte that was only read counts little; with duplicates there is one more pass, and it ends with all of it."""
    for number, dedupe in enumerate((None, Dedupe(("exact",)))):
        told: list[dict[str, int]] = []
        prepared(rows, tmp_path / str(number), told.append, dedupe=dedupe)
        (total,) = {figures["total_bytes"] for figures in told}
        passes = 2 if dedupe else 1
        assert total == pytest.approx(len(LINES) * (passes + look.LOOK_SHARE), abs=1)
        assert total < 1.1 * passes * len(LINES)
        done = [figures["done_bytes"] for figures in told]
        assert (done[0], done[-1], sorted(done)) == (0, total, done)
        assert int(len(LINES) * look.LOOK_SHARE) in done
