"""A task's shards are the same bytes, whatever writes them, and its record is believed only while they hold to it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from trainer.prepare.corpora.task import UNFINISHED, is_held_out, read_record, record_path, write_task
from trainer.prepare.texts import Text
from trainer.prepare.tokenizers import CharTokenizer, Gpt2Tokenizer, count_characters, shipped_gpt2_tokens

DOCUMENTS = [
    Text(f"d#{i}", f"Document {i}.\n" + "It says <|endoftext|> and — well — more.\n" * (i % 7)) for i in range(60)
]


@pytest.fixture(scope="module")
def gpt2() -> Gpt2Tokenizer:
    return Gpt2Tokenizer(shipped_gpt2_tokens(), threads=1)


def documents_of(path: Path, tokenizer: Gpt2Tokenizer) -> list[str]:
    """The texts between a shard's end-of-text tokens."""
    ids = np.fromfile(path, "<u2")[512:]
    assert ids[0] == tokenizer.eot_id
    rows = np.split(ids, np.flatnonzero(ids == tokenizer.eot_id))[1:]
    return [b"".join(tokenizer.tokens[i] for i in row[1:].tolist()).decode() for row in rows]


def test_every_document_is_in_one_split_whole_and_in_order(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    record = write_task(DOCUMENTS, gpt2, tmp_path, 4, val_fraction=0.2)
    held = [d.text for d in DOCUMENTS if is_held_out(hashlib.sha256(d.text.encode()).digest(), 0.2)]
    assert 2 < len(held) < 30
    assert documents_of(tmp_path / "val_000004.bin", gpt2) == held
    assert documents_of(tmp_path / "train_000005.bin", gpt2) == [d.text for d in DOCUMENTS if d.text not in held]
    assert (record["documents"], record["bytes"]) == (60, sum(len(d.text.encode()) for d in DOCUMENTS))
    assert read_record(tmp_path, 4) == record
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(UNFINISHED)]


def test_the_same_task_gives_the_same_bytes_wherever_it_is_done(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    records = [write_task(iter(DOCUMENTS), gpt2, tmp_path / place, 0, val_fraction=0.1) for place in ("here", "there")]
    assert records[0] == records[1]


def test_a_text_is_held_out_with_every_other_copy_of_it() -> None:
    digest = hashlib.sha256(b"the same words").digest()
    assert {is_held_out(digest, share) for share in (0.0, 1.0)} == {False, True}
    share = sum(is_held_out(hashlib.sha256(str(i).encode()).digest(), 0.1) for i in range(10_000)) / 10_000
    assert share == pytest.approx(0.1, abs=0.02)


def test_what_a_filter_drops_is_in_no_shard_and_is_counted(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    record = write_task(DOCUMENTS, gpt2, tmp_path, 0, val_fraction=0.0, drop=lambda text: text.name.endswith("7"))
    assert (record["documents"], record["dropped"]) == (54, 6)
    assert not any("Document 17." in text for text in documents_of(tmp_path / "train_000001.bin", gpt2))


def test_blank_documents_are_in_no_shard(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    record = write_task([Text("a", ""), Text("b", " \n "), Text("c", "words")], gpt2, tmp_path, 0, val_fraction=0.0)
    assert record["documents"] == 1
    assert documents_of(tmp_path / "train_000001.bin", gpt2) == ["words"]


def test_half_a_character_from_a_pipeline_of_ones_own_is_mended(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    pytest.importorskip("datatrove")
    from datatrove.data import Document

    from trainer.prepare.corpora.datatrove_steps import ShardSink

    odd = Document(text="half \ud83d of a pair", id="c", metadata={"url": "https://example.org/\ud83d"})
    ShardSink(tmp_path, "gpt2", 0.0).run(iter([odd]))
    assert documents_of(tmp_path / "train_000001.bin", gpt2) == ["half \ufffd of a pair"]


def test_the_pieces_of_a_long_document_are_one_document_of_one_split(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    texts = [Text(f"d#{i}", f"{i} one.\n") for i in range(40)]
    long = [part for text in texts for part in (text, Text(text.name, "two.", continues=True))]
    record = write_task(long, gpt2, tmp_path, 0, val_fraction=0.3, drop=lambda text: text.name == "d#7")
    kept = documents_of(tmp_path / "train_000001.bin", gpt2) + documents_of(tmp_path / "val_000000.bin", gpt2)
    assert sorted(kept) == sorted(f"{i} one.\ntwo." for i in range(40) if i != 7)
    assert (record["documents"], record["dropped"]) == (39, 1)


def test_a_long_document_is_blank_only_if_all_of_it_is(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    long = [Text("a", "\n\n"), Text("a", "words", continues=True), Text("a", "\n", continues=True)]
    blank = [Text("b", " "), Text("b", "\n", continues=True)]
    asked: list[str] = []
    record = write_task(
        [*blank, *long, *blank], gpt2, tmp_path, 0, val_fraction=0.0, drop=lambda t: asked.append(t.name)
    )
    assert documents_of(tmp_path / "train_000001.bin", gpt2) == ["words\n"]
    assert (record["documents"], asked) == (1, ["a"])


def test_a_character_tokeniser_puts_nothing_between_documents(tmp_path: Path) -> None:
    tokenizer = CharTokenizer.for_counts(count_characters(d.text for d in DOCUMENTS))
    write_task(DOCUMENTS, tokenizer, tmp_path, 0, val_fraction=0.0)
    ids = np.fromfile(tmp_path / "train_000001.bin", "<u2")[512:]
    assert b"".join(tokenizer.tokens[i] for i in ids.tolist()).decode() == "".join(d.text for d in DOCUMENTS)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "train_000001.bin").unlink(),
        lambda folder: (folder / "val_000000.bin").write_bytes(b"short"),
        lambda folder: record_path(folder, 0).write_text('{"v": 1'),
        lambda folder: record_path(folder, 0).write_text(
            record_path(folder, 0).read_text().replace("train_000001.bin", "train_000002.bin")
        ),
    ],
    ids=["a shard is gone", "a shard was cut", "the record was cut", "the record speaks of another task's shard"],
)
def test_a_record_whose_shards_do_not_hold_to_it_is_not_believed(
    tmp_path: Path, gpt2: Gpt2Tokenizer, damage: object
) -> None:
    write_task(DOCUMENTS, gpt2, tmp_path, 0, val_fraction=0.2)
    damage(tmp_path)  # type: ignore[operator]
    assert read_record(tmp_path, 0) is None


def test_a_record_of_another_request_is_not_believed(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    write_task(DOCUMENTS, gpt2, tmp_path, 0, val_fraction=0.2, identity="mine")
    assert read_record(tmp_path, 0, "mine") is not None
    assert read_record(tmp_path, 0, "yours") is None


def test_a_source_that_fails_half_way_leaves_nothing(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    def failing() -> object:
        yield from DOCUMENTS
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        write_task(failing(), gpt2, tmp_path, 0, val_fraction=0.2)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_record_is_json_that_stands_for_what_the_manifest_needs(tmp_path: Path, gpt2: Gpt2Tokenizer) -> None:
    write_task(DOCUMENTS, gpt2, tmp_path, 0, val_fraction=0.2)
    record = json.loads(record_path(tmp_path, 0).read_text())
    for entry in (*record["train"], *record["val"]):
        raw = (tmp_path / entry["name"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(raw), hashlib.sha256(raw).hexdigest())
        assert entry["tokens"] == (len(raw) - 1024) // 2
