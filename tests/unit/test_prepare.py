"""Text in, shards out: exact bytes, deterministic, refused in words, and never half there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.prepare import bpe, corpus, tokenizers
from trainer.prepare.build import Request, prepare
from trainer.prepare.corpus import hold_out, open_corpus, pieces, read_text
from trainer.prepare.errors import Refusal
from trainer.prepare.folders import staging
from trainer.prepare.shards import ShardWriter, read_vocabulary
from trainer.prepare.tokenizers import CharTokenizer, Gpt2Tokenizer, count_characters, shipped_gpt2_tokens

ROOT = Path(__file__).parents[2]
VERSE = "The quick brown fox jumps over the lazy dog.\nShe sells sea shells — by the sea shore!\n\n"


@pytest.fixture(scope="module")
def gpt2() -> Gpt2Tokenizer:
    return Gpt2Tokenizer(shipped_gpt2_tokens())


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_from_tiktoken", lambda: None)


def request(source: Path | str, out: Path, **changes: object) -> Request:
    settings = {"tokenizer": "char", "val_fraction": 0.1, "prompts": ("The ",), **changes}
    return Request(source=str(source), out=out, **settings)  # type: ignore[arg-type]


def run(source: Path | str, out: Path, **changes: object) -> dict:
    return prepare(request(source, out, **changes), lambda _: None)


def texts(folder: Path, count: int = 30) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:02}.txt").write_text(f"Document {number}.\n" + VERSE * (1 + number % 5), encoding="utf-8")
    return folder


def tokens_of(folder: Path, split: str) -> np.ndarray:
    files = json.loads((folder / "data.json").read_bytes())[split]
    return np.concatenate([np.fromfile(folder / f["name"], "<u2")[512:] for f in files])


def decoded(folder: Path, split: str) -> str:
    vocabulary = read_vocabulary(folder)
    return b"".join(vocabulary[i] for i in tokens_of(folder, split).tolist()).decode()


def command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "trainer.prepare", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


def test_no_character_is_lost_between_the_text_and_the_shards(tmp_path: Path) -> None:
    source = texts(tmp_path / "in")
    run(source, tmp_path / "out")
    whole = decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "val")
    originals = [path.read_text(encoding="utf-8") for path in source.iterdir()]
    assert len(whole) == sum(map(len, originals))
    assert all(text in whole for text in originals)


def test_the_folder_is_what_the_formats_page_says(tmp_path: Path) -> None:
    run(texts(tmp_path / "in"), tmp_path / "out", tokenizer="gpt2")
    manifest = json.loads((tmp_path / "out" / "data.json").read_bytes())
    assert manifest["eot"] == "before"
    assert manifest["tokenizer"]["vocab_size"] == 50257
    shard = tmp_path / "out" / "train_000001.bin"
    header = np.fromfile(shard, "<i4", count=256)
    entry = manifest["train"][0]
    assert header[:4].tolist() == [20240520, 1, entry["tokens"], 0]
    assert shard.stat().st_size == entry["bytes"] == 1024 + 2 * entry["tokens"]
    assert hashlib.sha256(shard.read_bytes()).hexdigest() == entry["sha256"]
    digest = hashlib.sha256()
    for token in read_vocabulary(tmp_path / "out"):
        digest.update(len(token).to_bytes(4, "little") + token)
    assert digest.hexdigest() == manifest["tokenizer"]["sha256"]
    train = tokens_of(tmp_path / "out", "train")
    assert train[0] == 50256, "the end-of-text token stands before each document"
    assert (train == 50256).sum() + (tokens_of(tmp_path / "out", "val") == 50256).sum() == 30
    assert json.loads((tmp_path / "out" / "prompts.json").read_bytes()) == [{"text": "The ", "ids": [464, 220]}]


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    source = texts(tmp_path / "in")
    run(source, tmp_path / "one")
    run(source, tmp_path / "two")
    assert {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "two").iterdir()
    }


def test_no_document_is_in_both_splits(tmp_path: Path) -> None:
    train, val = hold_out(open_corpus(str(texts(tmp_path / "in"))), 0.2)
    held = {part.document.name for part in val}
    assert held
    assert not held & {part.document.name for part in train}


def test_one_long_file_is_held_out_from_the_end_of_a_line_on(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(VERSE * 200, encoding="utf-8")
    found = open_corpus(str(book))
    (train,), (val,) = hold_out(found, 0.1)
    text = read_text(found.documents[0])
    assert train.stop == val.start
    assert text[val.start] == "\n"
    assert 0.05 < 1 - val.start / len(text) < 0.2


PREFACE = "A line of the preface.\n" * 60


@pytest.mark.parametrize("line", ["words and more ", "—"], ids=["words", "no space"])
def test_a_line_as_long_as_the_text_changes_little_of_what_is_held_out(tmp_path: Path, line: str) -> None:
    book = tmp_path / "book.txt"
    book.write_text(PREFACE + line * 20_000, encoding="utf-8")
    found = open_corpus(str(book))
    (train,), (val,) = hold_out(found, 0.1)
    text = read_text(found.documents[0])
    assert train.stop == val.start
    assert 0.09 < 1 - val.start / len(text) < 0.11
    assert text[val.start] in " —"


@pytest.mark.parametrize("line", ["words and more ", "—"], ids=["words", "no space"])
def test_a_line_longer_than_the_limit_is_taken_up_to_the_limit(tmp_path: Path, line: str) -> None:
    book = tmp_path / "book.txt"
    book.write_text(PREFACE + line * 20_000, encoding="utf-8")
    for limit_bytes in (30_001, 30_002, 30_003):
        found = open_corpus(str(book), limit_bytes)
        assert 0.99 * limit_bytes < found.bytes <= limit_bytes
        assert read_text(found.documents[0])[-1] in "sdre—", "a whole word, or at least a whole character"


def test_shards_are_cut_at_their_length(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train", shard_tokens=10) as writer:
        writer.write(np.arange(7, dtype=np.uint16))
        writer.write(np.arange(7, 25, dtype=np.uint16))
    assert [(e["name"], e["tokens"]) for e in writer.entries] == [
        ("train_000001.bin", 10),
        ("train_000002.bin", 10),
        ("train_000003.bin", 5),
    ]
    back = np.concatenate([np.fromfile(tmp_path / e["name"], "<u2")[512:] for e in writer.entries])
    assert back.tolist() == list(range(25))


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
    with pytest.raises(Refusal, match="sha256"):
        shipped_gpt2_tokens(tmp_path / "vocab.bpe")


def test_a_network_that_never_answers_costs_seconds_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
    cut = list(pieces(text, most))
    assert "".join(cut) == text
    assert all(len(piece) <= most for piece in cut)


@pytest.mark.parametrize("line_end", ["\n", " "], ids=["lines", "one line"])
def test_pieces_have_the_tokens_of_the_whole(gpt2: Gpt2Tokenizer, line_end: str) -> None:
    text = "".join(f"def f{i}(x):\n\n\n    return x  # it's {i}\n \n" for i in range(200)).replace("\n", line_end)
    whole = gpt2.encode([text])[0].tolist()
    for most in (60, 61, 67, 101, 997):
        assert np.concatenate(gpt2.encode(list(pieces(text, most)))).tolist() == whole


def test_a_run_of_white_space_may_be_of_any_length(gpt2: Gpt2Tokenizer) -> None:
    text = "x" + " " * 1_100_000 + "y"
    ids = np.concatenate(gpt2.encode(list(pieces(text))))
    assert b"".join(gpt2.tokens[i] for i in ids.tolist()).decode() == text


def test_a_vocabulary_is_never_trained_on_a_word_whose_square_would_take_minutes() -> None:
    given = list(bpe._sample(["x" + " " * 100_000, "and words " * 10_000]))
    assert sum(map(len, given)) == 200_001
    assert max(len(word) for piece in given for word in re.findall(r"\s+|\S+", piece)) <= 4096


@given(st.text(min_size=1), st.integers(2, 50))
@settings(max_examples=100, deadline=None)
def test_every_kept_character_comes_back_and_every_other_is_marked(text: str, limit: int) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokenizer = CharTokenizer.for_counts(count_characters([text]), limit)
    assert len(tokenizer.tokens) <= limit
    back = "".join(tokenizer.tokens[i].decode() for i in tokenizer.encode([text])[0])
    kept = {token.decode() for token in tokenizer.tokens}
    assert back == "".join(c if c in kept else "\ufffd" for c in text)


def test_the_character_vocabulary_fits_the_text() -> None:
    english = CharTokenizer.for_counts(count_characters([VERSE * 1000 + "日本"]))
    assert {t.decode() for t in english.tokens} == {*VERSE, "\ufffd"}, "a few rare characters cost no embedding"
    cyrillic = "Съешь же ещё этих мягких французских булок, да выпей чаю.\n"
    assert {t.decode() for t in CharTokenizer.for_counts(count_characters([cyrillic])).tokens} == {*cyrillic, "\ufffd"}


def test_a_vocabulary_without_the_character_for_all_others_refuses_what_it_lacks_by_name() -> None:
    tokenizer = CharTokenizer([character.encode() for character in "\nabc"])
    assert [ids.tolist() for ids in tokenizer.encode(["ab\nc", ""])] == [[1, 2, 0, 3], []]
    with pytest.raises(Refusal, match=r'no "é" \(U\+00E9\)') as found:
        tokenizer.encode(["abc", "aéb"])
    assert found.value.code == "data.unknown_character"


@pytest.mark.parametrize(("tokenizer", "lacking"), [("char", '"Ωж"'), ("gpt2", None)])
def test_a_prompt_with_characters_that_the_text_has_not_is_said_while_nothing_is_paid(
    tmp_path: Path, tokenizer: str, lacking: str | None
) -> None:
    talk: list[str] = []
    changes = {"tokenizer": tokenizer, "prompts": ("Document ж of Ω", "Document \ufffd", "Document ")}
    prepare(request(texts(tmp_path / "in"), tmp_path / "out", **changes), talk.append)
    shown = 'the prompt "Document ж of Ω" has characters that the vocabulary has not, read as U+FFFD: '
    assert [line for line in talk if "prompt" in line] == ([shown + lacking] if lacking else [])


def test_the_second_call_takes_the_cache_and_gives_the_same(tmp_path: Path) -> None:
    source, cache = texts(tmp_path / "in"), tmp_path / "cache"
    first = run(source, tmp_path / "one", cache=cache)
    second = run(source, tmp_path / "two", cache=cache, prompts=("She ",))
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["key"] == second["key"]
    assert tokens_of(tmp_path / "one", "train").tolist() == tokens_of(tmp_path / "two", "train").tolist()
    assert json.loads((tmp_path / "two" / "prompts.json").read_bytes())[0]["text"] == "She "
    for change in ({"val_fraction": 0.2}, {"limit_bytes": 3000}, {"vocab_limit": 20}, {"tokenizer": "gpt2"}):
        assert run(source, tmp_path / "three", cache=cache, **change)["key"] != first["key"]


@pytest.mark.parametrize("file", ["train_000001.bin", "vocab.json", "data.json"])
def test_a_damaged_cache_entry_is_made_again(tmp_path: Path, file: str) -> None:
    source, cache = texts(tmp_path / "in"), tmp_path / "cache"
    key = run(source, tmp_path / "one", cache=cache)["key"]
    damaged = cache / key / file
    damaged.write_bytes(damaged.read_bytes()[:-3])
    assert run(source, tmp_path / "two", cache=cache)["cached"] is False
    assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


def test_a_limit_takes_whole_lines_from_all_over_the_folder(tmp_path: Path) -> None:
    source = texts(tmp_path / "in", count=100)
    found = open_corpus(str(source), limit_bytes=4000)
    assert 3800 < found.bytes <= 4000
    assert max(int(d.name[:2]) for d in found.documents) > 50, "not merely the first ones by name"
    assert open_corpus(str(source), limit_bytes=4000).digest == found.digest


def test_the_standard_library_is_text_on_every_machine(tmp_path: Path) -> None:
    found = open_corpus("stdlib", limit_bytes=300_000)
    assert len(found.documents) > 3
    assert all(d.name.endswith(".py") and "test" not in d.name.split("/")[:-1] for d in found.documents)


def test_what_is_no_text_is_passed_over_and_counted(tmp_path: Path) -> None:
    source = texts(tmp_path / "in")
    (source / "picture.png").write_bytes(b"\x89PNG\0\0")
    (source / "sound.mp3").write_bytes(b"\xff\xfe\0\0\1\0" * 9)  # Begins as UTF-16 does.
    (source / "link.txt").symlink_to("/etc/hostname")
    (source / "linked").symlink_to(texts(tmp_path / "elsewhere"))
    (source / ".env").write_text("SECRET=1")
    os.mkfifo(source / "pipe")
    result = run(source, tmp_path / "out")
    assert result["skipped"] == {"binary": 2, "hidden": 1, "links": 2, "devices": 1}
    assert "SECRET" not in decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "val")


@pytest.mark.parametrize("name", ["rows.jsonl", "ROWS.NDJSON", "rows.jsonl.gz", "rows.parquet"])
def test_rows_are_never_learned_with_their_brackets(tmp_path: Path, name: str) -> None:
    source = texts(tmp_path / "in")
    (source / name).write_text('{"text": "to be"}\n' * 4000)
    said: list[str] = []
    assert prepare(request(source, tmp_path / "out"), said.append)["skipped"] == {"in rows": 1}
    assert "passed over: 1 in rows" in said
    assert "{" not in decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "val")
    with pytest.raises(Refusal, match="1 in rows") as refused:
        run(source / name, tmp_path / "alone")
    assert "gpurun data prepare" in refused.value.hint


def test_of_a_large_file_that_is_no_text_only_the_beginning_is_read(tmp_path: Path) -> None:
    source = texts(tmp_path / "in", count=2)
    with open(source / "model.safetensors", "wb") as file:
        file.write(b"\0")
        file.truncate(200_000_000)
    tracemalloc.start()
    try:
        found = open_corpus(str(source))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert (found.skipped, len(found.documents)) == ({"binary": 1}, 2)


def test_a_text_too_large_for_memory_is_named_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = texts(tmp_path / "in", count=2)
    (source / "book.txt").write_text(VERSE * 1000, encoding="utf-8")
    monkeypatch.setattr(corpus, "_memory_bytes", lambda: 100_000)
    with pytest.raises(Refusal, match=r"book\.txt has .* GB are there") as refused:
        open_corpus(str(source))
    assert refused.value.code == "memory.full"
    assert open_corpus(str(source), limit_bytes=40_000).bytes > 39_000


def _latin1(path: Path) -> None:
    path.write_bytes(b"Cr\xe8me" + VERSE.encode() * 9)


@pytest.mark.parametrize(
    ("make", "code", "says"),
    [
        (lambda path: None, "data.missing", "no file or folder"),
        (lambda path: path.write_bytes(b""), "data.empty", "holds no text"),
        (lambda path: path.write_bytes(b" \n" * 400), "data.empty", "holds no text"),
        (lambda path: path.write_bytes(b"\0\1\2" * 400), "data.empty", "1 binary"),
        (lambda path: path.mkdir(), "data.empty", "holds no text"),
        (lambda path: (path / ".hidden").mkdir(parents=True), "data.empty", "1 hidden"),
        (lambda path: path.write_text("short"), "data.too_small", "at least 65 are needed"),
        (_latin1, "data.not_utf8", "byte 0xe8 at offset 2"),
        (lambda path: path.write_text(VERSE, encoding="utf-16"), "data.not_utf8", "is UTF-16"),
        (lambda path: path.write_text("\u8bcd" * 400, encoding="utf-16"), "data.not_utf8", "is UTF-16"),
        (lambda path: os.mkfifo(path), "data.not_a_file", "neither a file nor a folder"),
    ],
)
def test_refusals_say_what_is_wrong_and_leave_nothing(tmp_path: Path, make, code: str, says: str) -> None:
    make(tmp_path / "in")
    with pytest.raises(Refusal) as refused:
        run(tmp_path / "in", tmp_path / "out", cache=tmp_path / "cache")
    assert refused.value.code == code
    assert says in refused.value.message
    assert refused.value.hint
    assert {path.name for path in tmp_path.rglob("*")} <= {"in", ".hidden", "cache", ".lock"}


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = texts(tmp_path / "in", count=3)

    def deny(path: Path, mode: str) -> object:  # chmod would not stop a test that runs as root
        if path.name == "01.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, mode)

    monkeypatch.setattr(corpus, "open", deny, raising=False)
    with pytest.raises(Refusal, match=r"01\.txt cannot be read: Permission denied"):
        run(source, tmp_path / "out")


def test_a_source_that_cannot_be_looked_for_is_one_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refusal, match="cannot be read: File name too long"):
        run(tmp_path / ("long" * 100), tmp_path / "out")
    source, lstat = texts(tmp_path / "in", count=3), Path.lstat

    def taken_away(path: Path) -> os.stat_result:  # After the folder was listed.
        if path.name == "01.txt":
            path.unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", taken_away)
    with pytest.raises(Refusal, match=r"01\.txt cannot be read: No such file"):
        run(source, tmp_path / "out")


def test_prepared_shards_are_not_mistaken_for_text(tmp_path: Path) -> None:
    run(texts(tmp_path / "in"), tmp_path / "out")
    with pytest.raises(Refusal) as refused:
        run(tmp_path / "out", tmp_path / "again")
    assert refused.value.code == "data.already_prepared"


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("dear")
    with pytest.raises(Refusal, match="holds other files"):
        run(texts(tmp_path / "in"), tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "dear"


def test_an_earlier_result_is_replaced_whole(tmp_path: Path) -> None:
    source = texts(tmp_path / "in")
    run(source, tmp_path / "out", tokenizer="gpt2")
    run(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "data.json").read_bytes())["tokenizer"]["name"] == "char"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_the_command_answers_in_one_line_of_json(tmp_path: Path) -> None:
    source, out = texts(tmp_path / "in"), tmp_path / "out"
    done = command("--source", str(source), "--tokenizer", "char", "--prompts", '["The "]', "--out", str(out))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["data"]["folder"] == str(out)
    assert answer["data"]["sha256"] == hashlib.sha256((out / "data.json").read_bytes()).hexdigest()
    assert done.stderr.startswith("prepare: 30 documents")
    refused = command("--source", str(tmp_path / "nowhere"), "--tokenizer", "char", "--out", str(out))
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"]["code"] == "data.missing"
    assert "Traceback" not in refused.stderr


def test_a_disk_that_takes_no_more_leaves_nothing_half_there(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(VERSE * 4000, encoding="utf-8")

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    arguments = ("--source", str(book), "--tokenizer", "char", "--out", str(tmp_path / "out"))
    done = command(*arguments, "--cache", str(tmp_path / "cache"), preexec_fn=small_files)
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "disk.write_failed"
    assert {path.name for path in tmp_path.rglob("*")} == {"book.txt", "cache", ".lock"}


def test_a_killed_prepare_leaves_no_folder_and_the_next_one_sweeps(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = "import sys,time;from pathlib import Path;from trainer.prepare.folders import staging\n"
    script += "with staging(Path(sys.argv[1])) as f: (f/'part').write_bytes(b'x');print('in',flush=True);time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, str(out)], cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.kill()
    assert not out.exists()
    assert len(list(tmp_path.iterdir())) == 1
    with staging(out):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_one_that_waits_for_another_says_so(tmp_path: Path) -> None:
    """What tokenises a large text holds the cache for minutes, or for good where it was stopped with ^Z."""
    source, cache, said = texts(tmp_path / "in"), tmp_path / "cache", queue.Queue[str]()
    run(source, tmp_path / "one", cache=cache)
    with open(cache / ".lock") as held, ThreadPoolExecutor(1) as beside:
        fcntl.flock(held, fcntl.LOCK_EX)
        later = beside.submit(prepare, request(source, tmp_path / "two", cache=cache), said.put)
        try:
            told = [said.get(timeout=5), said.get(timeout=5)]
        finally:
            held.close()
        assert later.result()["cached"] is True
    assert told[-1] == "another run tokenises just now; waiting for it"


def test_two_prepares_at_once_share_one_cache(tmp_path: Path) -> None:
    source, cache = texts(tmp_path / "in"), tmp_path / "cache"
    line = [
        sys.executable,
        "-m",
        "trainer.prepare",
        "--source",
        str(source),
        "--tokenizer",
        "char",
        "--cache",
        str(cache),
    ]
    children = [
        subprocess.Popen([*line, "--out", str(tmp_path / f"out{i}")], cwd=ROOT, stdout=subprocess.PIPE)
        for i in range(3)
    ]
    answers = [json.loads(child.communicate(timeout=60)[0]) for child in children]
    assert sorted(answer["cached"] for answer in answers) == [False, True, True]
    assert len({answer["data"]["sha256"] for answer in answers}) == 1
    assert sorted(path.name for path in cache.iterdir()) == [".lock", answers[0]["key"]]
