"""Tests of a vocabulary trained on the user's text, which can be used without the library that trained it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpurun.core.errors import UsageError
from gpurun.data import bpe
from gpurun.data.bpe import train_bpe
from gpurun.data.documents import documents_of
from gpurun.data.layout import AS_FOUND
from gpurun.data.prepare import PrepareOrder, prepare
from gpurun.data.run_shards import write_prompts
from gpurun.data.shard_folder import inspect
from gpurun.data.source_file import FileSpan
from gpurun.data.sources import open_source
from trainer.generate import encode
from trainer.shards import Tokenizer
from trainer.tokenizer import GPT2_EOT, BpeTokenizer, printable_bytes, read_vocabulary, shipped_gpt2_tokens

ODD = "naïve café 🦉\n\n  two  spaces 123\t'll don't <|endoftext|>\u2028 end \x00 日本語のテキスト"


@pytest.fixture(scope="module")
def real() -> list[str]:
    """Return the documents of two megabytes of the standard library."""
    source = open_source("stdlib", AS_FOUND, print, val_fraction=0.1, limit_bytes=2_000_000)
    whole = (FileSpan(file, 0, file.text_bytes) for file in source.files)
    return [document.text for document in documents_of(whole, AS_FOUND)]


@pytest.fixture(scope="module")
def tokens(real: list[str]) -> list[bytes]:
    return train_bpe(real, 3000)


def test_its_ids_are_gpt2s_way_bytes_merges_end_of_text(tokens: list[bytes]) -> None:
    assert len(tokens) == len(set(tokens)) == 3000
    assert tokens[:256] == [bytes([byte]) for byte in printable_bytes()] == shipped_gpt2_tokens()[:256]
    assert tokens[-1] == GPT2_EOT
    assert b" self" in tokens


def test_tiktoken_gives_the_same_ids_as_the_training_library(real: list[str], tokens: list[bytes]) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2999, min_frequency=2, show_progress=False, initial_alphabet=alphabet)
    library.train_from_iterator(real, trainer)
    ours = BpeTokenizer(tokens)
    unseen = [path.read_text(encoding="utf-8") for path in sorted(Path(np.__file__).parent.glob("*.py"))]
    for text in [ODD, *real[:20], *unseen[:6]]:
        assert ours.encode([text])[0].tolist() == library.encode(text).ids


def test_every_text_comes_back_and_never_yields_end_of_text(tokens: list[bytes]) -> None:
    tokenizer = BpeTokenizer(tokens, threads=1)
    ids = tokenizer.encode([ODD, ""])
    assert b"".join(tokens[i] for i in ids[0]).decode() == ODD
    assert ids[0].dtype == np.uint16
    assert tokenizer.eot_id == 2999 not in ids[0]
    assert len(ids[1]) == 0


def test_the_same_text_gives_the_same_tokens_on_any_threads(tmp_path: Path, real: list[str]) -> None:
    (tmp_path / "text").write_text("\n".join(real[:40]), encoding="utf-8")
    program = (
        "import sys, hashlib; from gpurun.data.bpe import train_bpe; from pathlib import Path;"
        "print(hashlib.sha256(b'/'.join(train_bpe([Path(sys.argv[1]).read_text(encoding='utf-8')], 600))).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "text")],
            env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True, check=True, cwd=Path(__file__).parents[2],
        ).stdout
        for threads in ("1", "2", "7")
    }  # fmt: skip
    assert len(found) == 1


def test_a_little_text_gives_a_token_for_each_repeated_pair() -> None:
    assert train_bpe(["ab ab"], 1000)[256:] == [b"ab", GPT2_EOT]
    assert len(train_bpe(["\ud800 half a pair"], 257)) == 257


def test_of_a_large_text_a_sample_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "SAMPLE_CHARS", 11)
    assert train_bpe(["ab ab ab", "cd cd cd"], 1000)[256:] == [b"ab", b" ab", GPT2_EOT]


@pytest.mark.parametrize("size", [1, 256, 50_258])
def test_a_vocabulary_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"{size:,} tokens") as refused:
        train_bpe(["text"], size)
    assert refused.value.code == "tokenizer.vocab_size"


def test_shards_are_made_with_it_and_need_only_their_folder(tmp_path: Path) -> None:
    (source := tmp_path / "in").mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text(f"The owl number {number} says hoo.\n" * (5 + number))
    out = tmp_path / "out"
    lines: list[str] = []
    made = prepare(PrepareOrder(str(source), "bpe", out, val_fraction=0.2, vocab_size=300), lines.append)
    write_prompts(out, BpeTokenizer(read_vocabulary(out)), ["The owl"], lines.append)
    found = inspect(out, tokenizer="bpe", vocab_size=320)
    tokens = read_vocabulary(out)
    assert any(line.startswith(f"{len(tokens)} tokens ") for line in lines)
    assert made.manifest["tokenizer"]["vocab_size"] == found.vocab_size == len(tokens) <= 300
    manifest = json.loads((out / "data.json").read_bytes())
    assert (manifest["eot"], manifest["tokenizer"]["eot_id"]) == ("before", len(tokens) - 1)
    (prompt,) = json.loads((out / "prompts.json").read_bytes())
    assert b"".join(tokens[i] for i in prompt["ids"]) == b"The owl"
    known = Tokenizer("bpe", found.tokenizer_sha256, len(tokens) - 1, tuple(tokens))
    assert encode("The owl", known) == prompt["ids"]
    assert encode("", known) == [len(tokens) - 1]
    ids = np.fromfile(out / manifest["val"][0]["name"], "<u2")[512:]
    assert known.decode(ids.tolist()).count("owl") > 5
