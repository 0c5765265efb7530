"""Tests of a corpus with files for training, validation and test: they stay apart, and no test row is trained on."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.data.layout import parse_layout
from gpurun.data.prepare import PrepareOrder, prepare
from tests.refusals import refusal
from tests.unit.data.layouts import documents, opened, refused


def lines(split: str, count: int = 300) -> str:
    return "".join(f"{split} says {number} things\n" for number in range(count))


def made(source: Path, out: Path, said: list[str] | None = None, **layout: str) -> dict[str, str]:
    """Prepare a source; return the text of each split, decoded from the shards alone."""
    order = PrepareOrder(str(source), "char", out, layout=parse_layout(**layout))
    prepare(order, (said if said is not None else []).append)
    manifest = json.loads((out / "data.json").read_bytes())
    tokens = tokenizers.read_vocabulary(out)
    return {
        split: b"".join(
            tokens[i] for entry in manifest[split] for i in np.fromfile(out / entry["name"], "<u2")[512:].tolist()
        ).decode()
        for split in ("train", "val")
    }


LAYOUTS = {
    "wikitext": ["wiki.{}.raw", "train", "valid", "test"],
    "ptb": ["ptb.{}.txt", "train", "valid", "test"],
    "folders": ["{}/part-0.txt", "train", "dev", "test"],
    "plain": ["{}.txt", "train", "validation", "test"],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("form", ["folder", "zip"])
def test_splits_follow_file_names_and_test_is_left_alone(tmp_path: Path, name: str, form: str) -> None:
    pattern, *splits = LAYOUTS[name]
    for split in splits:
        path = tmp_path / "corpus" / pattern.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines(split))
    source = tmp_path / "corpus"
    if form == "zip":
        with zipfile.ZipFile(tmp_path / "corpus.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(source.rglob("*.*")):
                archive.write(path, f"wiki/{path.relative_to(source)}")
        source = tmp_path / "corpus.zip"
    said: list[str] = []
    found = made(source, tmp_path / "out", said)
    assert found == {"train": lines(splits[0]), "val": lines(splits[1])}
    output = " ".join(said)
    assert f"{'corpus.zip/wiki/' * (form == 'zip')}{pattern.format(splits[1])}" in output
    assert output.count("test") >= 2
    assert "1 test" in output


def test_the_hubs_three_parquet_splits_stay_apart_behind_links(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    blobs, snapshot = tmp_path / "d" / "blobs", tmp_path / "d" / "snapshots" / "abc" / "wikitext-2"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, split in enumerate(("test", "train", "validation")):
        table = arrow.table({"text": [f"{split} {row}" for row in range(50)]})
        parquet.write_table(table, blobs / str(number))
        (snapshot / f"{split}-00000-of-00001.parquet").symlink_to(f"../../../blobs/{number}")
    found = documents(snapshot.parent)
    assert {(text.held_out, text.text.split()[0]) for text in found} == {(False, "train"), (True, "validation")}
    assert len(found) == 100


def test_test_beside_rows_without_such_a_name_is_left_alone(
    tmp_path: Path,
) -> None:
    for name in ("corpus", "test"):
        rows = "".join(json.dumps({"text": f"{name} {row}"}) + "\n" for row in range(300))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    (tmp_path / "README.md").write_text("corpus of a test\n")
    found = made(tmp_path, tmp_path.parent / "out")
    assert "test" not in (found["train"] + found["val"]).replace("of a test", "")
    assert found["val"]


def test_val_says_what_is_held_out_wherever_it_lies(tmp_path: Path) -> None:
    folder, apart = tmp_path / "texts", tmp_path / "apart.txt"
    folder.mkdir()
    (folder / "a.txt").write_text(lines("a"))
    (folder / "b.txt").write_text(lines("b"))
    apart.write_text(lines("c"))
    assert made(folder, tmp_path / "1", val=str(apart)) == {"train": lines("a") + lines("b"), "val": lines("c")}
    assert made(folder, tmp_path / "2", val=str(folder / "b.txt")) == {"train": lines("a"), "val": lines("b")}
    refused(folder, "data.missing", "nowhere", val=str(tmp_path / "nowhere"))
    with refusal(UsageError, "usage.unused", "--val-fraction"):
        documents(folder, val=str(apart), val_fraction=0.1)


def test_contradictory_split_names_are_refused_until_decided(tmp_path: Path) -> None:
    for name in ("train.txt", "test.txt", "notes.txt"):
        (tmp_path / name).write_text(lines(name))
    refused(tmp_path, "data.split_in_doubt", "notes.txt", "--exclude", "--val none")
    assert {one.text.split()[0] for one in documents(tmp_path, exclude=("notes.txt",))} == {"train.txt"}
    assert len(opened(tmp_path, val="none").files) == 3


def test_a_folder_of_programs_is_not_split_by_its_file_names(tmp_path: Path) -> None:
    for name in ("train.py", "test.py", "dev/tool.py", "test/test_it.js", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(lines(name))
    source = opened(tmp_path)
    assert (len(source.files), source.divided, source.is_divided) == (5, "", False)
