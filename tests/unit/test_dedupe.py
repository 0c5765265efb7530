"""Tests of deduplication: only the first of equal documents stays, and a document without duplicates always stays."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurun.core.errors import UsageError
from gpurun.data.dedupe import search as search_module
from gpurun.data.dedupe import signatures
from gpurun.data.dedupe.fingerprint import NO_KEY, normalised_url, signature, similarity, text_key, url_key
from gpurun.data.dedupe.signatures import BLOCK, Dedupe, SignatureFile, signature_path
from gpurun.data.dedupe.stage import FingerprintWriter, drop_filter, find_duplicates, read_duplicates
from gpurun.data.documents import documents_of
from gpurun.data.layout import AS_FOUND
from gpurun.data.source_file import Document, FileSpan
from gpurun.data.sources import open_source
from gpurun.data.split import EVERY
from gpurun.data.tasks import write_task
from tests.refusals import refusal
from trainer import tokenizer as tokenizers
from trainer.tokenizer import CharTokenizer

WORDS = [f"word{number}" for number in range(5000)]
EVERY_KIND = Dedupe()


def prose(seed: int, words: int = 200) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def changed(text: str, share: float, seed: int) -> str:
    """Return the text with this share of its words replaced at random places."""
    draw = random.Random(seed)
    parts = re.split(r"(\w+)", text)
    places = range(1, len(parts), 2)
    for place in draw.sample(places, max(1, round(share * len(places)))):
        parts[place] = f"other{draw.randrange(10**6)}"
    return "".join(parts)


def sign(folder: Path, index: int, texts: Iterable[Document], dedupe: Dedupe = EVERY_KIND) -> None:
    FingerprintWriter(folder, dedupe, "mine", AS_FOUND).do(index, texts, lambda count: None)


def dropped(folder: Path, tasks: Sequence[Sequence[Document]], dedupe: Dedupe = EVERY_KIND) -> list[str]:
    """Return the names of the dropped texts. The steps sign, search and filter exchange files in `folder`."""
    folder.mkdir(exist_ok=True)
    for index, texts in enumerate(tasks):
        sign(folder, index, texts, dedupe)
    find_duplicates(folder, len(tasks), dedupe, identity="mine")
    names = []
    for index, texts in enumerate(tasks):
        goes = drop_filter(folder, index)
        names += [text.name for text in texts if goes()]
    return names


@pytest.fixture(scope="module")
def real() -> list[Document]:
    """Return the documents of the standard library that have at least forty words."""
    source = open_source("stdlib", AS_FOUND, print, val_fraction=0.1, limit_bytes=3_000_000)
    whole = (FileSpan(file, 0, file.text_bytes) for file in source.files)
    return [text for text in documents_of(whole, AS_FOUND) if len(re.findall(r"\w+", text.text)) >= 40]


def test_planted_duplicates_are_found_and_clean_documents_stay(tmp_path: Path, real: list[Document]) -> None:
    corpus = [Document(text.name, text.text, f"https://example.com/{number}") for number, text in enumerate(real)]
    planted = []
    for number, text in enumerate(corpus):
        planted += [
            Document(f"exact {number}", text.text.replace("\n", "\r\n") + "  \n"),
            Document(f"near {number}", changed(text.text, random.Random(number).uniform(0.02, 0.05), number)),
            Document(f"url {number}", f"{prose(number, 80)}", f"http://www.example.com/{number}/?utm_source=feed#top"),
        ]
    random.Random(1).shuffle(planted)
    tasks = [corpus[::2], corpus[1::2], planted[::2], planted[1::2]]
    gone = set(dropped(tmp_path, tasks))
    for kind in ("exact", "near", "url"):
        names = {text.name for text in planted if text.name.startswith(kind)}
        assert len(names & gone) >= 0.95 * len(names), kind
    assert len({text.name for text in corpus} & gone) <= 0.01 * len(corpus)


def test_the_first_in_order_stays_however_the_tasks_are_cut(tmp_path: Path) -> None:
    texts = [Document(f"{number}", prose(number % 7)) for number in range(40)]
    everything = dropped(tmp_path / "one", [texts])
    assert everything == [f"{number}" for number in range(7, 40)]
    assert dropped(tmp_path / "five", [texts[:3], texts[3:3], texts[3:20], texts[20:21], texts[21:]]) == everything


def test_another_case_and_one_more_sentence_are_a_near_duplicate(tmp_path: Path) -> None:
    texts = [
        Document("a", prose(1)),
        Document("b", prose(1).upper() + " And one more sentence at its end."),
        Document("c", prose(2)),
    ]
    assert dropped(tmp_path / "near", [texts]) == ["b"]
    assert dropped(tmp_path / "exact", [texts], Dedupe(("exact", "url"))) == []


def test_each_kind_is_looked_for_among_those_the_last_one_left(tmp_path: Path) -> None:
    first, second = prose(1), prose(2)
    texts = [Document("a", first, "x.org/1"), Document("b", first, "x.org/2"), Document("c", second, "x.org/2")]
    # c has b's address and is dropped for it; then b is dropped, because its text is a's.
    assert dropped(tmp_path / "all", [texts]) == ["b", "c"]
    assert dropped(tmp_path / "texts", [texts], Dedupe(("exact",))) == ["b"]
    assert dropped(tmp_path / "addresses", [texts], Dedupe(("url",))) == ["c"]


def test_a_document_stays_that_only_resembles_one_that_goes(tmp_path: Path) -> None:
    words = prose(5, 400).split()
    a, b, c = words[:240], words[60:300], words[120:360]  # Neighbours share three quarters; a and c share half.
    texts = [Document(name, " ".join(part)) for name, part in (("a", a), ("b", b), ("c", c))]
    assert similarity(*(signature(t.text)[None] for t in (texts[0], texts[2])))[0] < 0.5
    assert dropped(tmp_path, [texts]) == ["b"]


def test_documents_without_words_or_an_address_duplicate_nothing(tmp_path: Path) -> None:
    texts = ["!!! ???", "??? !!!", "-", "."]
    assert dropped(tmp_path, [[Document(text, text, "  ") for text in texts]]) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://www.example.com/a/", "http://EXAMPLE.com/a"),
        ("https://example.com:443/a?b=2&a=1", "example.com/a?a=1&b=2"),
        ("http://example.com/a?utm_source=x&id=7#part", "http://example.com/a?id=7"),
        ("http://example.com/a b", "http://example.com/a%20b"),
        ("http://example.com", "http://example.com/?"),
    ],
)
def test_addresses_of_one_page_are_one(one: str, other: str) -> None:
    assert normalised_url(one) == normalised_url(other)
    assert url_key(one) == url_key(other) != NO_KEY


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://example.com/a", "http://example.com/A"),
        ("http://example.com/?id=1", "http://example.com/?id=2"),
        ("http://a.example.com/", "http://b.example.com/"),
        ("http://example.com:8080/", "http://example.com/"),
        ("http://[broken/1", "http://[broken/2"),
    ],
)
def test_addresses_of_two_pages_are_two(one: str, other: str) -> None:
    assert url_key(one) != url_key(other)


def test_a_text_is_the_same_in_any_white_space_and_accent_form() -> None:
    assert text_key("Ein  Café\r\n\r\nam Ufer ") == text_key("\n Ein Cafe\u0301 am\tUfer")
    assert text_key("Ein Café") != text_key("ein Café")
    assert text_key(" \n") == NO_KEY


def test_a_long_text_is_read_in_pieces_and_signed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = prose(3, 3000).replace(" ", "\n") + "\n!"
    whole, key = signature(text), text_key(text)
    monkeypatch.setattr(tokenizers.cut_for_encoding, "__defaults__", (100,))
    assert len(list(tokenizers.cut_for_encoding(text))) > 100
    assert (signature(text) == whole).all()
    assert text_key(text) == key


def test_signatures_give_the_jaccard_similarity_of_word_fives() -> None:
    for share in (0.02, 0.05, 0.2):
        one, other = prose(9, 2000), changed(prose(9, 2000), share, 4)
        runs = [{tuple(w[i : i + 5]) for i in range(len(w) - 4)} for w in (one.split(), other.split())]
        exact = len(runs[0] & runs[1]) / len(runs[0] | runs[1])
        assert abs(similarity(signature(one)[None], signature(other)[None])[0] - exact) < 0.13


def test_languages_without_spaces_have_words_too(tmp_path: Path) -> None:
    draw = random.Random(2)
    text = "".join(chr(draw.randrange(0x4E00, 0x5E00)) for _ in range(400))
    near = text[:200] + "新" + text[201:]
    other = "".join(chr(draw.randrange(0x4E00, 0x5E00)) for _ in range(400))
    assert dropped(tmp_path, [[Document("a", text), Document("b", near), Document("c", other)]]) == ["b"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=24), st.data())
def test_removed_documents_repeat_kept_ones_and_kept_ones_none(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int]], data: st.DataObject
) -> None:
    texts = [
        Document(f"{number}", changed(prose(base), 0.02, change) if change else prose(base))
        for number, (base, change) in enumerate(drawn)
    ]
    cut = data.draw(st.integers(0, len(texts)))
    gone = set(dropped(tmp_path_factory.mktemp("d"), [texts[:cut], texts[cut:]], Dedupe(("exact", "near"))))
    firsts = {}
    for text, (base, _) in zip(texts, drawn, strict=True):
        assert (text.name in gone) == (base in firsts)
        firsts.setdefault(base, text)


def test_a_search_in_small_parts_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [Document(f"{n}", changed(prose(n % 60), 0.03, n) if n >= 60 else prose(n)) for n in range(200)]
    expected = dropped(tmp_path / "whole", [texts])
    monkeypatch.setattr(search_module, "_KEYS_AT_ONCE", 7)
    monkeypatch.setattr(search_module, "_PAIRS_AT_ONCE", 3)
    assert dropped(tmp_path / "parts", [texts[:90], texts[90:]]) == expected == [f"{n}" for n in range(60, 200)]


def test_blocks_are_read_back_where_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [Document(f"{n}", prose(n, 12), f"x.org/{n}") for n in range(23)]
    monkeypatch.setattr(signatures, "BLOCK", 10)
    assert BLOCK > 23
    dedupe = Dedupe()
    sign(tmp_path, 0, texts)
    file = SignatureFile(signature_path(tmp_path, 0), dedupe)
    columns = [np.concatenate(list(file.column(number))) for number in range(len(dedupe.columns))]
    assert columns[0].tolist() == [url_key(text.url) for text in texts]
    assert columns[1].tolist() == [text_key(text.text) for text in texts]
    rows = file.signatures(np.array([0, 9, 10, 22]))
    assert (rows == np.stack([signature(texts[n].text) for n in (0, 9, 10, 22)])).all()


def test_signatures_count_only_whole_and_for_the_same_choice(tmp_path: Path) -> None:
    mine, other = (FingerprintWriter(tmp_path, EVERY_KIND, identity, AS_FOUND) for identity in ("mine", "another"))
    assert not mine.is_done(0)
    sign(tmp_path, 0, [Document("a", prose(1))])
    assert mine.is_done(0)
    assert not other.is_done(0)
    path = signature_path(tmp_path, 0)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert not mine.is_done(0)


def test_signing_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def vanishing() -> Iterable[Document]:
        yield Document("a", prose(1))
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        sign(tmp_path, 0, vanishing())
    assert list(tmp_path.iterdir()) == []


def test_a_finished_search_is_believed_until_its_files_change(tmp_path: Path) -> None:
    texts = [Document("a", prose(1)), Document("b", prose(1))]
    dropped(tmp_path, [texts])
    record = read_duplicates(tmp_path, "mine")
    assert record is not None
    assert record["dropped"] == {"url": 0, "exact": 1, "near": 0}
    assert record["documents"] == 2
    assert not signature_path(tmp_path, 0).exists()  # Signatures are large, and no longer needed.
    assert read_duplicates(tmp_path, "other") is None
    (tmp_path / record["tasks"][0]["name"]).write_bytes(b"")
    assert read_duplicates(tmp_path, "mine") is None


def test_a_task_is_written_without_its_duplicates(tmp_path: Path) -> None:
    texts = [Document("a", prose(1)), Document("b", prose(2)), Document("c", prose(1)), Document("d", prose(3))]
    assert dropped(tmp_path / "work", [texts]) == ["c"]
    tokenizer = CharTokenizer([*(bytes([code]) for code in range(32, 127)), "\ufffd".encode()])
    place, alone = tmp_path / "out", tmp_path / "alone"
    place.mkdir()
    alone.mkdir()
    filtered = drop_filter(tmp_path / "work", 0)
    record = write_task(texts, tokenizer, place, 0, bound=EVERY // 100, identity="", drop=filtered)
    wanted = [text for text in texts if text.name != "c"]
    same = write_task(wanted, tokenizer, alone, 0, bound=EVERY // 100, identity="")
    assert record["train"] == same["train"]
    assert (record["documents"], record["dropped"]) == (3, 1)


@pytest.mark.parametrize("kinds", [(), ("fuzzy",), ("near", "near")])
def test_a_choice_that_is_none_is_refused(kinds: tuple[str, ...]) -> None:
    with refusal(UsageError, "dedupe.kind", "--dedupe"):
        Dedupe(kinds)


def test_a_similarity_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"1\.5"):
        Dedupe(threshold=1.5)
