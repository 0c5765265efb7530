"""Tests of the tokenisers: GPT-2's token ids, characters ranked by frequency, and text cut only between tokens."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.data import bpe
from tests.refusals import refusal
from trainer.errors import Refused
from trainer.tokenizer import CharTokenizer, Gpt2Tokenizer, count_characters, cut_for_encoding, shipped_gpt2_tokens


@pytest.fixture(scope="module")
def gpt2() -> Gpt2Tokenizer:
    return Gpt2Tokenizer(shipped_gpt2_tokens())


def test_the_shipped_merges_are_gpt2(gpt2: Gpt2Tokenizer) -> None:
    assert len(gpt2.tokens) == 50257
    assert len(set(gpt2.tokens)) == 50257
    known = {
        "Hello world": [15496, 995],
        "Hello, I'm a language model,": [15496, 11, 314, 1101, 257, 3303, 2746, 11],
        "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29],
        "": [],
    }
    assert [ids.tolist() for ids in gpt2.encode(list(known))] == list(known.values())


def test_merges_that_were_tampered_with_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.bpe").write_bytes(tokenizers.GPT2_MERGES.read_bytes() + b"x y\n")
    with pytest.raises(Refused, match="sha256"):
        shipped_gpt2_tokens(tmp_path / "vocab.bpe")


def test_a_silent_network_costs_seconds_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    over = threading.Event()

    def never(_: str) -> None:
        over.wait(30)
        raise OSError("offline")

    monkeypatch.undo()
    monkeypatch.setattr(tiktoken, "get_encoding", never)
    monkeypatch.setattr(tokenizers, "_DOWNLOAD_S", 0.1)
    began = time.monotonic()
    assert tokenizers.load_gpt2(lambda _: None).encode(["Hello world"])[0].tolist() == [15496, 995]
    assert time.monotonic() - began < 10
    over.set()


@given(st.text(alphabet=st.sampled_from("ab 1.\n\t'é\u3000"), max_size=200), st.integers(5, 40))
@example("a\n\n\nb" * 9, 5)
@settings(max_examples=200, deadline=None)
def test_a_text_cut_into_pieces_is_the_same_text(text: str, most: int) -> None:
    cut = list(cut_for_encoding(text, most))
    assert "".join(cut) == text
    assert all(len(piece) <= most for piece in cut)


@pytest.mark.parametrize("line_end", ["\n", " "], ids=["lines", "one line"])
def test_pieces_have_the_tokens_of_the_whole(gpt2: Gpt2Tokenizer, line_end: str) -> None:
    text = "".join(f"def f{i}(x):\n\n\n    return x  # it's {i}\n \n" for i in range(200)).replace("\n", line_end)
    whole = gpt2.encode([text])[0].tolist()
    for most in (60, 61, 67, 101, 997):
        assert np.concatenate(gpt2.encode(list(cut_for_encoding(text, most)))).tolist() == whole


def test_a_run_of_white_space_may_be_of_any_length(gpt2: Gpt2Tokenizer) -> None:
    text = "x" + " " * 1_100_000 + "y"
    ids = np.concatenate(gpt2.encode(list(cut_for_encoding(text))))
    assert b"".join(gpt2.tokens[i] for i in ids.tolist()).decode() == text


def test_no_vocabulary_trains_on_a_word_that_takes_minutes() -> None:
    given = list(bpe._sample_pieces(["x" + " " * 100_000, "and words " * 10_000]))
    assert sum(map(len, given)) == 200_001
    assert max(len(word) for piece in given for word in re.findall(r"\s+|\S+", piece)) <= 4096


@given(st.text(min_size=1), st.integers(2, 50))
@settings(max_examples=100, deadline=None)
def test_every_kept_character_returns_and_others_are_marked(text: str, limit: int) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokenizer = CharTokenizer.from_character_counts(count_characters([text]), limit)
    assert len(tokenizer.tokens) <= max(limit, 1)
    back = "".join(tokenizer.tokens[i].decode() for i in tokenizer.encode([text])[0])
    kept = {token.decode() for token in tokenizer.tokens}
    assert back == "".join(c if c in kept else "\ufffd" for c in text)


def test_every_character_is_kept_that_there_is_an_id_for() -> None:
    text = "the quick brown fox" * 1000 + "日本"
    kept = {token.decode() for token in CharTokenizer.from_character_counts(count_characters([text])).tokens}
    assert kept == {*text, "�"}
    exact = CharTokenizer.from_character_counts(count_characters([text]), len({*text}))
    assert {token.decode() for token in exact.tokens} == {*text}, "where all fit, none stands for others"
    fewer = CharTokenizer.from_character_counts(count_characters([text]), len({*text}) - 1)
    assert {*text} - {token.decode() for token in fewer.tokens} == {"日", "本"}
    assert "�" in {token.decode() for token in fewer.tokens}


def test_a_vocabulary_without_a_substitute_names_what_it_lacks() -> None:
    tokenizer = CharTokenizer([character.encode() for character in "\nabc"])
    assert [ids.tolist() for ids in tokenizer.encode(["ab\nc", ""])] == [[1, 2, 0, 3], []]
    with refusal(Refused, "data.unknown_character", '"é"', "U+00E9"):
        tokenizer.encode(["abc", "aéb"])
