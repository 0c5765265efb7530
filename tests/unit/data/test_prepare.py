"""Tests of the way from a corpus to shards: both verbs and any number of processes make the same bytes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.data import prepare as pipeline
from gpurun.data import prepare_state, tasks
from gpurun.data.dedupe.signatures import Dedupe
from gpurun.data.layout import Layout
from gpurun.data.prepare import Prepared, PrepareOrder, prepare
from gpurun.data.run_shards import order_for, prepare_run_shards
from gpurun.data.split import EVERY, bound_for, bound_for_few, hash_text
from gpurun.data.tasks import UNFINISHED
from gpurun.jobs.training.recipe import load_recipe, resolve
from tests.refusals import lacking, refusal

ROOT = Path(__file__).parents[3]
WORDS = "the quick brown fox jumps over a lazy dog while she sells sea shells — by the sea shore\n"
EOT = 50256


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_from_tiktoken", lambda: None)
    monkeypatch.setattr(tasks, "_LEAST_BYTES", 1)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a folder with a thousand documents in two files of rows."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(2):
        rows = [{"text": f"Document {number}.{i}\n" + WORDS * (i % 9), "url": f"http://x/{i}"} for i in range(500)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def made(source: Path | str, out: Path, *, workers: int = 1, **changes: Any) -> Prepared:
    order = {"tokenizer": "gpt2", "val_fraction": 0.05, "shard_tokens": 2000, **changes}
    return prepare(PrepareOrder(source=str(source), out=out, **order), lambda _: None, workers=workers)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ids_of(folder: Path, split: str) -> np.ndarray:
    """Return the tokens of a split, read from the shards in llm.c's format without gpurun's reader."""
    entries = json.loads((folder / "data.json").read_bytes())[split]
    return np.concatenate([np.fromfile(folder / entry["name"], "<u2")[512:] for entry in entries])


def documents_in(folder: Path, split: str) -> list[str]:
    """Return the documents of a split, decoded by the vocabulary beside it and divided at the end-of-text token."""
    vocabulary = tokenizers.read_vocabulary(folder)
    whole = b"".join(b"\0" if i == EOT else vocabulary[i] for i in ids_of(folder, split).tolist()).decode()
    return whole.split("\0")[1:]


# The shards


def test_every_document_is_in_one_split_once_after_its_id(corpus: Path, tmp_path: Path) -> None:
    made(corpus, tmp_path / "out")
    rows = [json.loads(line)["text"] for path in sorted(corpus.iterdir()) for line in path.open()]
    train, val = (documents_in(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(rows)
    held = sum(map(len, val)) / sum(map(len, rows))
    assert 0.04 < held < 0.06


def test_any_number_of_processes_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        made(corpus, tmp_path / str(workers), workers=workers)
    assert content(tmp_path / "1") == content(tmp_path / "3")
    assert len(json.loads((tmp_path / "1" / "data.json").read_bytes())["train"]) > 10


@pytest.mark.parametrize("name", ["mini-gpt", "shakespeare-bpe"])
def test_both_verbs_make_the_same_shards_of_the_same_text(tmp_path: Path, name: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i}: {WORDS}" for i in range(4000)))
    resolved = resolve(load_recipe(name), "full").record
    prepare(order_for(resolved, str(text), tmp_path / "folder"), lambda _: None)
    prepare_run_shards(resolved, str(text), into=tmp_path / "run", cache=tmp_path / "cache", say=lambda _: None)
    run = content(tmp_path / "run")
    del run["prompts.json"]
    assert run == content(tmp_path / "folder")


def test_forty_stories_with_marks_are_forty_documents(tmp_path: Path) -> None:
    text = tmp_path / "stories.txt"
    text.write_text("".join(f"Story {i} of forty.\n<|endoftext|>\n" for i in range(40)))
    found = made(text, tmp_path / "out").manifest
    assert found["source"]["documents"] == 40
    ids = np.concatenate([ids_of(tmp_path / "out", split) for split in ("train", "val")])
    assert int((ids == EOT).sum()) == 40
    assert "endoftext" not in "".join(documents_in(tmp_path / "out", "train"))


def test_held_out_text_is_never_trained_on_even_if_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(100):
        for copy, end in zip("abc", ("", "\n", "  \n\n"), strict=True):
            (folder / f"{copy}{number}.txt").write_text(f"Text {number}: {WORDS * 3}{end}")
    made(folder, tmp_path / "out", val_fraction=0.1)
    train, val = ({" ".join(d.split()) for d in documents_in(tmp_path / "out", split)} for split in ("train", "val"))
    assert len(val) == 10
    assert not train & val


@pytest.mark.parametrize("size", [230, 5_000, 300_000])
@pytest.mark.parametrize("fraction", [0.1, 0.02])
def test_of_one_text_about_the_fraction_is_held_out(tmp_path: Path, size: int, fraction: float) -> None:
    words = [f"word{i}" for i in range(60_000)]
    (tmp_path / "a.txt").write_text(" ".join(words)[:size])
    made(tmp_path / "a.txt", tmp_path / "out", tokenizer="char", val_fraction=fraction)
    share = len(ids_of(tmp_path / "out", "val")) / size
    assert 0.5 * fraction < share < 2 * fraction or (size == 230 and 0 < share < 0.2)


def test_one_text_in_a_folder_is_one_text(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "book.txt").write_text("".join(f"{i}: {WORDS}" for i in range(3000)))
    made(tmp_path / "texts", tmp_path / "out", val_fraction=0.1)
    train, val = (len(ids_of(tmp_path / "out", split)) for split in ("train", "val"))
    assert 0.08 < val / (train + val) < 0.12


def test_consecutive_pieces_of_a_text_are_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_LEAST_BYTES", 1 << 20)
    text = "".join(f"{i}: {WORDS}" for i in range(3000))
    (tmp_path / "a.txt").write_text(text)
    found = made(tmp_path / "a.txt", tmp_path / "out", val_fraction=0.1, shard_tokens=10**6)
    breaks = int((ids_of(tmp_path / "out", "train") == EOT).sum())
    assert breaks < found.manifest["source"]["documents"] / 4
    parts = [part for split in ("train", "val") for part in documents_in(tmp_path / "out", split)]
    assert all(part in text for part in parts)


def test_a_source_of_one_repeated_document_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the same\n<|endoftext|>\n" * 30)
    with refusal(UsageError, "data.one_document"):
        made(tmp_path / "a.txt", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.bin"))


def test_held_out_bytes_come_as_near_the_fraction_as_possible() -> None:
    assert bound_for(0.25) == EVERY // 4
    few = [(key, 10) for key in range(0, 1000, 10)]
    bound = bound_for_few(few, 0.1, "it")
    assert sum(size for key, size in few if key < bound) == 100
    assert 0 < bound_for_few([(1, 5), (2, 5000)], 0.001, "it") <= 2, "one is held out, and one is not"
    assert hash_text("a  b\n") == hash_text(" a b") != hash_text("a c")
    assert hash_text("e\u0301") == hash_text("\u00e9")
    assert hash_text("one\ttwo\x1f\n") == hash_text("one\u3000two"), "white space of any kind"
    assert hash_text("one two é") != hash_text("one two e")


# Characters


def test_no_character_is_lost_for_which_there_is_an_id(tmp_path: Path) -> None:
    (tmp_path / "chess.txt").write_text("abcdefgh12345678" * 2000 + "x")
    talk: list[str] = []
    prepare(PrepareOrder(str(tmp_path / "chess.txt"), "char", tmp_path / "out"), talk.append)
    assert {*b"".join(tokenizers.read_vocabulary(tmp_path / "out")).decode()} == {*"abcdefgh12345678x\ufffd"}
    assert not [line for line in talk if "no id" in line]


def test_characters_beyond_the_recipes_size_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdef" * 500 + "xyz")
    talk: list[str] = []
    prepare(PrepareOrder(str(tmp_path / "a.txt"), "char", tmp_path / "out", vocab_size=7), talk.append)
    assert [line for line in talk if lacking(line, "3 rarer", "0.10%") == []]
    assert "\ufffd" in b"".join(tokenizers.read_vocabulary(tmp_path / "out")).decode()


def test_a_limit_takes_about_so_much_from_all_over_the_folder(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(300):
        (tmp_path / "texts" / f"{number:03}.txt").write_text(f"{number}: {WORDS * 10}")
    found = made(tmp_path / "texts", tmp_path / "out", limit_bytes=100_000).manifest["source"]
    assert 95_000 < found["bytes"] < 105_000
    taken = {text.split(":")[0] for text in documents_in(tmp_path / "out", "train") if ":" in text[:4]}
    assert {int(number) // 100 for number in taken} == {0, 1, 2}


def test_the_standard_library_is_text_on_every_machine(tmp_path: Path) -> None:
    found = made("stdlib", tmp_path / "out", limit_bytes=500_000, shard_tokens=10**6).manifest
    assert found["source"]["kind"] == "stdlib"
    assert "import" in "".join(documents_in(tmp_path / "out", "train"))


# Continuing an unfinished folder


def started(source: Path, out: Path, **options: Any) -> subprocess.Popen[str]:
    """Start `gpurun data prepare` in its own process group, with two workers unless `options` say otherwise."""
    flags = [f"--{key}={value}" for key, value in {"workers": 2, "shard-tokens": 60_000, **options}.items()]
    command = [sys.executable, "-m", "gpurun", "data", "prepare", "shakespeare-bpe", "--source", str(source)]
    return subprocess.Popen(
        [*command, "--out", str(out), *flags], cwd=ROOT, text=True, stderr=subprocess.PIPE, start_new_session=True,
        stdout=subprocess.PIPE, env={**os.environ, "GPURUN_HOME": str(out.parent / "home")},
    )  # fmt: skip


def large(folder: Path) -> Path:
    """Write 6 MB of text, enough that a kill comes before `prepare` ends, and return its folder."""
    folder.mkdir()
    rows = "".join(json.dumps({"text": f"Document {i}\n" + WORDS * (i % 60)}) + "\n" for i in range(120))
    for number in range(20):
        (folder / f"{number:03}.jsonl").write_text(rows.replace("Document", f"Document {number}."))
    return folder


def until(holds: Callable[[], Any], what: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def records(out: Path) -> list[Path]:
    return sorted(out.glob("task-*.json"))


def test_killed_midway_it_redoes_at_most_a_shard_per_process(tmp_path: Path) -> None:
    source, out = large(tmp_path / "corpus"), tmp_path / "out"
    running = started(source, out)
    until(lambda: len(records(out)) >= 4 and list(out.glob(f"{UNFINISHED}*")), "four shards are done")
    running.kill()
    running.communicate()
    # The workers notice that their parent has ended.
    until(lambda: not _alive(running.pid), "its processes end with it", limit_s=10)
    done = [json.loads(path.read_text()) for path in records(out)]
    names = [entry["name"] for record in done for split in ("train", "val") for entry in record[split]]
    before = {name: (out / name).stat().st_mtime_ns for name in names}
    assert not (out / "data.json").exists()
    assert len([place for place in out.glob(f"{UNFINISHED}*") if place.is_dir()]) <= 2
    damaged = out / names[0]
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"\0\0")
    again = started(source, out)
    _, talk = again.communicate(timeout=60)
    assert again.returncode == 0, talk
    assert f"{len(done) - 1} of " in talk, "the one that was damaged meanwhile is made again"
    after = {name: (out / name).stat().st_mtime_ns for name in names[2:]}
    assert after == {name: before[name] for name in names[2:]}
    straight = started(source, tmp_path / "straight", workers=1)
    straight.communicate(timeout=60)
    assert content(out) == content(tmp_path / "straight")


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_worker_ends_it_with_a_word_and_keeps_the_rest(tmp_path: Path) -> None:
    source, out = large(tmp_path / "corpus"), tmp_path / "out"
    running = started(source, out)
    until(lambda: records(out), "a shard is done")
    working = f"/proc/{running.pid}/task/{running.pid}/children"
    children = [int(pid) for pid in Path(working).read_text().split()]
    below = [int(pid) for child in children for pid in _children(child)]
    os.kill(below[-1], signal.SIGKILL)
    _, talk = running.communicate(timeout=30)
    assert running.returncode == 4, talk
    assert "killed one of the processes" in talk
    assert records(out)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.fixture
def begun(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which two shards are finished and the third one failed."""
    out, real = tmp_path / "begun", tasks.write_task

    def third_fails(*given: Any, **more: Any) -> Any:
        if len(records(out)) == 2:
            raise OSError(28, "No space left on device", str(out))
        return real(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_task", third_fails)
        with refusal(SetupError, "disk.full", "begun"):
            made(corpus, out)
    assert not list(out.glob(f"{UNFINISHED}*")), "what is half made takes no room"
    return out


def test_the_finished_parts_of_a_failed_prepare_are_not_redone(corpus: Path, begun: Path, tmp_path: Path) -> None:
    first = sorted(begun.glob("train_*.bin"))[0]
    before = first.stat().st_mtime_ns
    made(corpus, begun, workers=2)
    assert first.stat().st_mtime_ns == before
    made(corpus, tmp_path / "straight")
    assert content(begun) == content(tmp_path / "straight")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"val_fraction": 0.2}, "--val-fraction was 0.05, now 0.2"),
        ({"tokenizer": "char"}, "--tokenizer was gpt2, now char"),
        ({"dedupe": Dedupe(("exact",))}, "--dedupe was none, now exact"),
        ({"limit_bytes": 10_000}, "--limit-bytes was 0, now 10000"),
    ],
)
def test_going_on_with_other_options_is_refused_and_says_which(
    corpus: Path, begun: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as error:
        made(corpus, begun, **change)
    assert error.value.code == "prepare.other"
    assert len(records(begun)) == 2


def test_continuing_with_another_source_or_version_is_refused(
    corpus: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "FORMAT", pipeline.FORMAT + 1)
        with refusal(UsageError, "prepare.other", "another version"):
            made(corpus, begun)
    (corpus / "0.jsonl").write_text('{"text": "other"}\n')
    with refusal(UsageError, "prepare.other", "files differ"):
        made(corpus, begun)


def test_an_early_refusal_is_cured_by_what_its_hint_says(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"story": f"{i} {WORDS}"}) + "\n" for i in range(100))
    (tmp_path / "a.jsonl").write_text(rows)
    with refusal(UsageError, "data.no_text_column", "'text'"):
        made(tmp_path / "a.jsonl", tmp_path / "out")
    assert made(tmp_path / "a.jsonl", tmp_path / "out", layout=Layout(column="story")).made


def test_asked_for_again_a_finished_folder_is_left_as_it_is(corpus: Path, tmp_path: Path) -> None:
    made(corpus, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert not made(corpus, tmp_path / "out").made
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    with refusal(UsageError, "data.out_in_use", "another source"):
        made(corpus, tmp_path / "out", val_fraction=0.3)


def test_two_prepares_into_one_folder_are_refused(corpus: Path, tmp_path: Path) -> None:
    with prepare_state.locked_folder(tmp_path / "out"):
        with refusal(UsageError, "prepare.busy"):
            made(corpus, tmp_path / "out")
        assert (tmp_path / "out").exists(), "the first keeps its folder, empty as it is"
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_in_it_is_not_written_into(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    with refusal(UsageError, "data.out_in_use", "other files"):
        made(corpus, tmp_path / "mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data.json").write_text('{"cells": []}')
    with refusal(UsageError, "data.out_in_use", "another source"):
        made(corpus, tmp_path / "other")
    assert content(tmp_path / "other") == {"data.json": b'{"cells": []}'}
    (tmp_path / "file").write_text("a file")
    with refusal(UsageError, "data.out_unusable"):
        made(corpus, tmp_path / "file")
    with refusal(UsageError, "data.out_in_source", "corpus"):
        made(corpus, corpus / "out")


def test_files_others_put_into_the_folder_are_never_removed(corpus: Path, begun: Path) -> None:
    (begun / "notes.txt").write_text("mine")
    made(corpus, begun)
    assert (begun / "notes.txt").read_text() == "mine"


def test_a_disk_too_small_is_refused_before_the_start_in_numbers(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with refusal(SetupError, "disk.too_small", "0.00 GB"):
        made(corpus, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.bin"))


def test_what_is_said_of_the_disk_is_near_what_is_taken(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(pipeline, "_FEW_BYTES", 0)
    talk: list[str] = []
    order = PrepareOrder(str(corpus), "gpt2", tmp_path / "out", val_fraction=0.05, shard_tokens=10**6)
    monkeypatch.setattr(pipeline, "_ALLOWANCE", 1000.0)
    prepare(order, talk.append)
    (said,) = [line for line in talk if line.count(" GB") == 2]
    taken = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.bin"))
    assert 0.8 < float(re.findall(r"[\d.]+", said)[0]) * 1e6 / taken < 1.2


def test_a_corpus_under_a_batch_is_refused_and_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    with refusal(UsageError, "data.too_small", "10,000,000"):
        made(corpus, tmp_path / "out", least_train_tokens=10_000_000)
    assert not (tmp_path / "out").exists()


# The cache of runs


def mini(tmp_path: Path, name: str, say: Callable[[str], None] = lambda _: None) -> Path:
    """Make the shards that `gpurun train mini-gpt --data text.txt` makes for a run of this name; return the folder."""
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{i}: {WORDS}" for i in range(4000)))
    resolved = resolve(load_recipe("mini-gpt"), "full").record
    found = prepare_run_shards(resolved, str(text), into=tmp_path / name, cache=tmp_path / "cache", say=say)
    assert found.folder == str(tmp_path / name)
    return tmp_path / name


def test_the_second_run_takes_the_cache_and_gets_the_same(tmp_path: Path) -> None:
    talk: list[str] = []
    first, second = mini(tmp_path, "first"), mini(tmp_path, "second", talk.append)
    assert content(first) == content(second)
    assert [line for line in talk if "cache" in line]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train_*.bin", lambda raw: raw[:-9]),
        ("vocab.json", lambda raw: raw[:-9]),
        ("vocab.json", lambda raw: json.dumps({"tokens_b64": json.loads(raw)["tokens_b64"][::-1]}).encode()),
    ],
    ids=["a shard", "no vocabulary", "another vocabulary"],
)
def test_a_damaged_cache_entry_is_made_again(tmp_path: Path, file: str, damage: Callable[[bytes], bytes]) -> None:
    first = mini(tmp_path, "first")
    damaged = next((tmp_path / "cache").glob(f"*/{file}"))
    damaged.write_bytes(damage(damaged.read_bytes()))
    assert content(mini(tmp_path, "second")) == content(first)


def test_two_prepares_at_once_share_one_cache(tmp_path: Path) -> None:
    gate = threading.Barrier(2)
    mini(tmp_path, "warm")
    for entry in (tmp_path / "cache").glob("*/data.json"):
        entry.unlink()

    def one(name: str) -> dict[str, bytes]:
        gate.wait()
        return content(mini(tmp_path, name))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, ["a", "b"])
    assert first == second


def test_a_refused_text_leaves_no_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short\n")
    with pytest.raises(UsageError):
        mini(tmp_path, "run")
    assert not (tmp_path / "run").exists()


def test_a_cached_text_too_small_for_this_recipe_is_refused_here(tmp_path: Path) -> None:
    """A text may be cached for a smaller recipe: it must be refused before the trainer would refuse it on paid time."""
    mini(tmp_path, "first")
    resolved = resolve(load_recipe("mini-gpt"), "full").record
    resolved["model"]["context"] = 100_000
    with refusal(UsageError, "data.too_small", "100,000 plus"):
        prepare_run_shards(
            resolved, str(tmp_path / "text.txt"), into=tmp_path / "b", cache=tmp_path / "cache", say=lambda _: None
        )


def test_a_text_of_tomorrow_is_prepared_once(tmp_path: Path) -> None:
    first, soon = mini(tmp_path, "first"), time.time() + 86_400
    os.utime(tmp_path / "text.txt", (soon, soon))
    talk: list[str] = []
    assert content(mini(tmp_path, "second")) != {}
    assert content(mini(tmp_path, "third", talk.append)).keys() == content(first).keys()
    assert [line for line in talk if "cache" in line]
