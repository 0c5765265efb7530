"""Tests of parallel text: how it is prepared, what the reader refuses, and which pairs a step reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from translation_lab import CONTEXT, Lab, lab_recipe, open_lab, written

from gpurun.core.errors import UsageError
from gpurun.data.pairs.grammar import english_german
from tests.trainer.tiny_training import shard_entry, write_shard
from trainer.data import micro_batch_starts, plan_batch
from trainer.errors import Refused
from trainer.pair_tokenizer import PairTokenizer
from trainer.shards import open_data
from trainer.translation.pairs import PairRow, read_special_tokens


@pytest.fixture(scope="module")
def german(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("german") / "data", "english-german", "word-pairs", context=CONTEXT)


@pytest.fixture
def lab(german: Path) -> Lab:
    return open_lab(german, lab_recipe("english-german", "word-pairs"))


@pytest.fixture(scope="module")
def pairs() -> dict[str, str]:
    return dict(english_german(20_000))


def test_the_built_in_sentences_are_the_same_everywhere(pairs: dict[str, str]) -> None:
    assert pairs["has a young father not taken a cow?"] == "hat ein junger Vater keine Kuh genommen?"
    assert pairs["the girls hope that the friendly sisters should not find a table in the school."] == (
        "die Mädchen hoffen, dass die freundlichen Schwestern keinen Tisch in der Schule finden sollen."
    )
    assert pairs["now this young doctor gives these friendly children the old horse in the forest."] == (
        "jetzt gibt dieser junge Arzt diesen freundlichen Kindern das alte Pferd im Wald."
    )
    digest = hashlib.sha256(json.dumps(list(pairs.items())).encode()).hexdigest()
    assert (len(pairs), digest[:16]) == (20_000, "072fc10ace8875a9")


def test_every_pair_comes_back_as_it_was_written(german: Path, lab: Lab, pairs: dict[str, str]) -> None:
    for split in (lab.task.train, lab.task.val):
        for pair in range(0, len(split), 97):
            source, target = (lab.task.text(ids.tolist()) for ids in (split.source(pair), split.target(pair)))
            assert pairs[source] == target
    manifest = json.loads((german / "data.json").read_text())
    assert manifest["pairs"]["train"] == len(lab.task.train)
    assert manifest["pairs"]["train"] + manifest["pairs"]["val"] == len(pairs)


def test_no_sentence_is_in_both_splits(tmp_path: Path) -> None:
    file = tmp_path / "text.tsv"
    file.write_text("".join(f"sentence {n % 50} here\tSatz {n} hier\n" for n in range(400)))
    folder = written(tmp_path / "data", str(file), "char-pairs", val_fraction=0.3)
    data = open_data(folder, "char-pairs", ())
    special = read_special_tokens(folder, data.tokenizer.vocab_size)
    rows = [PairRow(shards, special, CONTEXT, "text") for shards in (data.train, data.val)]
    train, val = ({bytes(row.source(pair)) for pair in range(len(row))} for row in rows)
    assert len(rows[0]) + len(rows[1]) == 400
    assert len(train) + len(val) == 50
    assert not train & val


def test_two_files_are_one_text_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    # Some of Python's functions take U+2028 for a line end; here it is part of a sentence.
    lines = [(f"a line {n}\u2028too", f"eine Zeile {n}") for n in range(60)]
    lines += [("no translation", ""), ("x " * 70, "y")]
    files = [tmp_path / "text.en", tmp_path / "text.de"]
    for side, file in enumerate(files):
        file.write_text("".join(pair[side] + "\n" for pair in lines), encoding="utf-8")
    folder = written(tmp_path / "data", ",".join(map(str, files)), "word-pairs", val_fraction=0.5)
    record = json.loads((folder / "data.json").read_text())
    assert record["pairs"]["train"] + record["pairs"]["val"] == 60
    assert record["pairs"]["too_long"] == 1
    assert record["source"]["documents"] == 61


@pytest.mark.parametrize(
    ("lines", "source", "facts"),
    [
        ("a\tb\na b\n", "text.tsv", "Line 2 .* 1 columns"),
        ("a\tb\tc\n", "text.tsv", "Line 1 .* 3 columns"),
        ("a\nb\n", "text.tsv,other", r"\b2 lines, .*\b1\b"),
        ("a\tb\n", "text.tsv", "pair"),
        ("a\tb\n", "absent.tsv", "absent.tsv .*No such file"),
    ],
)
def test_text_that_is_not_parallel_is_refused_with_the_place(
    tmp_path: Path, lines: str, source: str, facts: str
) -> None:
    (tmp_path / "text.tsv").write_text(lines)
    (tmp_path / "other").write_text("one line\n")
    named = ",".join(str(tmp_path / name) for name in source.split(","))
    with pytest.raises(UsageError, match=facts) as refused:
        written(tmp_path / "data", named, "char-pairs")
    assert refused.value.hint
    assert not (tmp_path / "data" / "data.json").exists()


def test_no_text_is_a_special_token_and_rare_words_are_unknown() -> None:
    tokenizer = PairTokenizer.for_pairs("word-pairs", [("the </s> cat", "the </s> cat"), ("rare", "the")])
    ids = [row.tolist() for row in tokenizer.encode(["</s> <pad> <s> the cat", "rare the"])]
    assert min(min(row) for row in ids) > 2
    assert tokenizer.tokens[3] == b"<unk>"
    assert ids[1][0] == 3
    assert b"".join(tokenizer.tokens[i] for i in ids[0]).startswith(b" </")


@pytest.mark.parametrize("broken", ["cut", "swapped", "padded", "beheaded"])
def test_shards_that_are_no_whole_pairs_are_refused(tmp_path: Path, broken: str) -> None:
    text = tmp_path / "text.tsv"
    text.write_text("".join(f"word {n}\tWort {n} da\n" for n in range(200)))
    folder = written(tmp_path / "data", str(text), "word-pairs")
    path = folder / "train_000001.bin"
    tokens = np.fromfile(path, dtype="<u2", offset=1024)
    changed = {
        "cut": tokens[:-1],
        "beheaded": tokens[1:],
        "swapped": np.where(np.arange(len(tokens)) == 0, 2, tokens),
        "padded": np.append(tokens[:-1], [0, 2]),
    }[broken]
    write_shard(path, changed)
    record = json.loads((folder / "data.json").read_text())
    record["train"] = [shard_entry(path, len(changed))]
    (folder / "data.json").write_text(json.dumps(record))
    with pytest.raises(Refused, match="train shards"):
        open_lab(folder, lab_recipe(str(folder), "word-pairs"))


def test_too_long_sentences_and_shards_of_text_are_refused(german: Path, tmp_path: Path) -> None:
    short = lab_recipe("english-german", "word-pairs", model={"context": 16}, train={"batch_tokens": 1024})
    with pytest.raises(Refused, match=r"pair \d+ of .* 2\d positions.* model\.context 16"):
        open_lab(german, short)
    record = json.loads((german / "data.json").read_text())
    del record["pairs"]
    (tmp_path / "data.json").write_text(json.dumps(record))
    data = open_data(german, "word-pairs", ())
    with pytest.raises(Refused, match='no "pairs"'):
        read_special_tokens(tmp_path, data.tokenizer.vocab_size)


def seen(lab: Lab, steps: range, micro_batch: int, processes: int) -> list[list[str]]:
    """Return the sorted target sentences of every step, from all processes together."""
    samples, sequences = lab.task.train_samples, 64
    found = []
    for step in steps:
        texts = []
        for rank in range(processes):
            for start in micro_batch_starts(range(step, step + 1), sequences, micro_batch, rank, processes):
                labels = samples.read(start, micro_batch)[2]
                texts += [lab.task.text(row.tolist()) for row in labels]
        found.append(sorted(texts))
    return found


def test_a_step_sees_the_same_pairs_however_it_is_cut(german: Path, lab: Lab) -> None:
    whole = seen(lab, range(4), 64, 1)
    assert seen(lab, range(4), 8, 4) == whole
    again = open_lab(german, lab_recipe("english-german", "word-pairs"))
    assert seen(again, range(2, 4), 16, 2) == whole[2:]


def test_an_epoch_has_every_pair_once(lab: Lab) -> None:
    samples, pairs = lab.task.train_samples, len(lab.task.train)
    assert sorted(samples.pair(sample) for sample in range(pairs)) == list(range(pairs))
    assert [samples.pair(sample) for sample in range(pairs, pairs + 9)] != [samples.pair(s) for s in range(9)]


def test_weights_make_every_real_label_count_alike(lab: Lab) -> None:
    plan = plan_batch(lab_recipe("english-german", "word-pairs", train={"micro_batch": 8}), 2)
    starts = [
        s for rank in range(2) for s in micro_batch_starts(range(3, 4), plan.sequences, plan.micro_batch, rank, 2)
    ]
    parts = [lab.task.train_samples.read(start, plan.micro_batch) for start in starts]
    tokens = [int((labels != 0).sum()) for _, _, labels, _ in parts]
    assert sum(tokens) == lab.task.train_samples.step_tokens(3)
    assert len({*tokens}) > 3, "sorted by length, portions differ"
    for (_, _, _, weight), count in zip(parts, tokens, strict=True):
        assert float(weight) == pytest.approx(count * len(parts) / sum(tokens))
