"""Any number of processes prepare a corpus into the same bytes, and a kill at any moment costs a shard a process."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.memory import tree_bytes
from trainer.prepare import folders, tokenizers
from trainer.prepare.corpora import division, room
from trainer.prepare.corpora.pipeline import Order, prepare_corpus
from trainer.prepare.corpora.task import UNFINISHED
from trainer.prepare.dedupe.signatures import Dedupe
from trainer.prepare.errors import Refusal
from trainer.prepare.shards import read_vocabulary
from trainer.prepare.sources import opening

ROOT = Path(__file__).parents[2]
WORDS = "the quick brown fox jumps over a lazy dog while she sells sea shells — by the sea shore\n"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_from_tiktoken", lambda: None)
    monkeypatch.setattr(division, "_LEAST_BYTES", 1)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A thousand documents in two files, 1.5 MB: some twenty tasks of 20,000 tokens."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for part in range(2):
        rows = ({"text": f"Document {part}.{i}\n" + WORDS * (i % 33)} for i in range(500))
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def order(source: Path, out: Path, **changes: Any) -> Order:
    settings = {"tokenizer": "gpt2", "val_fraction": 0.05, "shard_tokens": 20_000, "workers": 2, **changes}
    return Order(source=str(source), out=out, **settings)


def prepared(source: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return prepare_corpus(order(source, out, **changes), lambda _: None, lambda _: None)


def refusal(act: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as raised:
        act()
    assert raised.value.hint
    return raised.value


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "vocab.json"}


def started(source: Path, out: Path, **options: Any) -> subprocess.Popen[str]:
    """The program, in a process group of its own."""
    line = [sys.executable, "-m", "trainer.prepare.corpora", "--source", str(source), "--out", str(out)]
    given = {"val-fraction": 0.05, "shard-tokens": 20_000, "workers": 2, **options}
    line += [part for key, value in given.items() for part in (f"--{key}", str(value))]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=ROOT, start_new_session=True, stdout=pipe, stderr=pipe, text=True)


def until(true: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.01)


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("task-*.json"))


def large(folder: Path, copies: int = 40) -> Path:
    """Enough text to be killed in: 12 MB."""
    folder.mkdir()
    rows = "".join(json.dumps({"text": f"Document {i}\n" + WORDS * (i % 60)}) + "\n" for i in range(120))
    for number in range(copies):
        (folder / f"{number:03}.jsonl").write_text(rows.replace("Document", f"Document {number}."))
    return folder


def test_any_number_of_processes_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        prepared(corpus, tmp_path / str(workers), workers=workers)
    assert content(tmp_path / "1") == content(tmp_path / "3")
    manifest = json.loads((tmp_path / "1" / "data.json").read_bytes())
    assert len(manifest["train"]) > 10
    assert manifest["source"]["documents"] == 1000
    held = sum(entry["tokens"] for entry in manifest["val"])
    assert 0.01 < held / (held + sum(entry["tokens"] for entry in manifest["train"])) < 0.12


@pytest.mark.slow
def test_every_document_of_the_corpus_is_in_the_shards_once(corpus: Path, tmp_path: Path) -> None:
    prepared(corpus, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "data.json").read_bytes())
    vocabulary = read_vocabulary(tmp_path / "out")
    names = [entry["name"] for split in ("train", "val") for entry in manifest[split]]
    ids = np.concatenate([np.fromfile(tmp_path / "out" / name, "<u2")[512:] for name in names])
    text = b"".join(vocabulary[i] for i in ids.tolist()).decode()
    rows = [json.loads(line)["text"] for path in sorted(corpus.iterdir()) for line in path.open()]
    assert sorted(text.split("<|endoftext|>")[1:]) == sorted(rows)


@pytest.mark.slow
def test_a_character_tokenisers_vocabulary_is_that_of_the_whole_corpus(corpus: Path, tmp_path: Path) -> None:
    (corpus / "2.jsonl").write_text(json.dumps({"text": "Ωmega " * 4000}) + "\n")
    found = prepared(corpus, tmp_path / "out", tokenizer="char", val_fraction=0.2)["data"]
    vocabulary = [token.decode() for token in read_vocabulary(tmp_path / "out")]
    assert {"Ω", "—", "q"} < set(vocabulary)
    assert found["vocab_size"] == len(vocabulary)
    fewer = prepared(corpus, tmp_path / "fewer", tokenizer="char", val_fraction=0.2, vocab_size=20)["data"]
    assert fewer["vocab_size"] == 20


@pytest.mark.parametrize("tokenizer", ["char", "gpt2", "bpe"])
def test_half_a_character_that_json_spells_ends_no_prepare(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": f"{i} half \ud83d of a pair " * 40, "url": f"https://example.org/\ud83d{i}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"tokenizer": tokenizer, "dedupe": Dedupe(("url", "exact")), "val_fraction": 0.2, "workers": 1}
    prepared(tmp_path / "rows.jsonl", tmp_path / "out", **settings)
    manifest = json.loads((tmp_path / "out" / "data.json").read_bytes())
    assert (manifest["source"]["documents"], manifest["source"]["dropped"]) == (40, 0)


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_and_redoes_at_most_a_shard_a_process(tmp_path: Path) -> None:
    source, out = large(tmp_path / "corpus"), tmp_path / "out"
    running = started(source, out, **{"shard-tokens": 60_000})
    until(lambda: len(records(out)) >= 4 and list(out.glob(f"{UNFINISHED}*")), "four shards are done")
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    done = [json.loads(path.read_text()) for path in records(out)]
    names = [entry["name"] for record in done for split in ("train", "val") for entry in record[split]]
    before = {name: (out / name).stat().st_mtime_ns for name in names}
    assert not (out / "data.json").exists()
    assert len(list(out.glob(f"{UNFINISHED}*"))) <= 2
    again = started(source, out, **{"shard-tokens": 60_000})
    _, talk = again.communicate(timeout=60)
    assert again.returncode == 0, talk
    assert f"{len(done)} of " in talk
    assert {name: (out / name).stat().st_mtime_ns for name in names} == before
    prepared(source, tmp_path / "straight", shard_tokens=60_000)
    assert content(out) == content(tmp_path / "straight")


@pytest.mark.slow
def test_no_process_outlives_a_prepare_that_was_killed(tmp_path: Path) -> None:
    source, out = large(tmp_path / "corpus"), tmp_path / "out"
    running = started(source, out)
    until(lambda: records(out), "a shard is done")
    running.kill()
    running.communicate()
    until(lambda: not _alive(running.pid), "the whole group has ended", limit_s=10)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_shard_that_was_damaged_meanwhile_is_made_again(corpus: Path, tmp_path: Path) -> None:
    # So small that the program, which knows nothing of this module's smallest tasks, divides it alike.
    size = 10_000
    prepared(corpus, tmp_path / "straight", shard_tokens=size)
    running = started(corpus, tmp_path / "out", **{"shard-tokens": size})
    until(lambda: records(tmp_path / "out"), "a shard is done")
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    first = sorted((tmp_path / "out").glob("train_*.bin"))[0]
    first.write_bytes(first.read_bytes()[:-2] + b"\0\0")
    prepared(corpus, tmp_path / "out", shard_tokens=size)
    assert content(tmp_path / "out") == content(tmp_path / "straight")


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_it_with_a_word_and_the_rest_is_kept(tmp_path: Path) -> None:
    source, out = large(tmp_path / "corpus"), tmp_path / "out"
    killed: list[int] = []

    def kill_one(figures: dict[str, int]) -> None:
        if figures["tasks"] >= 2 and not killed:
            import multiprocessing

            killed.append(multiprocessing.active_children()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    found = refusal(lambda: prepare_corpus(order(source, out), lambda _: None, kill_one))
    assert found.code == "prepare.worker_died"
    assert "-9" in found.message
    assert len(records(out)) >= 2
    assert not list(out.glob(f"{UNFINISHED}*"))


@pytest.fixture
def begun(corpus: Path, tmp_path: Path) -> Path:
    """A prepare that broke off after some shards."""

    def stop(figures: dict[str, int]) -> None:
        if figures["tasks"] >= 3:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(order(corpus, out), lambda _: None, stop)
    assert len(records(out)) >= 3
    return out


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"val_fraction": 0.1}, "--val-fraction was 0.05, now 0.1"),
        ({"tokenizer": "char"}, "--tokenizer was gpt2, now char"),
        ({"shard_tokens": 30_000}, "--shard-tokens was 20000, now 30000"),
    ],
)
def test_going_on_with_other_options_is_refused_and_says_which(
    corpus: Path, begun: Path, changed: dict[str, Any], told: str
) -> None:
    found = refusal(lambda: prepared(corpus, begun, **changed))
    assert (found.code, told in found.message) == ("prepare.other", True)


@pytest.mark.slow
def test_going_on_with_a_source_that_changed_is_refused(corpus: Path, begun: Path) -> None:
    with (corpus / "1.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    found = refusal(lambda: prepared(corpus, begun))
    assert (found.code, "files differ" in found.message) == ("prepare.other", True)


@pytest.mark.slow
def test_going_on_with_another_versions_work_is_refused(corpus: Path, begun: Path) -> None:
    state = json.loads((begun / "prepare.json").read_bytes())
    state["asked"]["format"] -= 1
    (begun / "prepare.json").write_text(json.dumps(state))
    found = refusal(lambda: prepared(corpus, begun))
    assert (found.code, "another version of gpurun began it" in found.message) == ("prepare.other", True)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_was_refused_before_anything_was_done_is_begun_anew_with_what_the_hint_says(
    form: str, tmp_path: Path
) -> None:
    """Its answer to a wrong column was a refusal of the right one."""
    rows = [{"content": f"Document {i}\n" + WORDS * (i % 33), "text": 1} for i in range(300)]
    if form == "jsonl":
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        said = [{"summary": "too long " * 1000, **row, "text": 1} for row in rows]
        parquet.write_table(arrow.Table.from_pylist(said), tmp_path / "rows.parquet", row_group_size=20)
    source, wrong = tmp_path / f"rows.{form}", "text" if form == "jsonl" else "summary"
    if form == "jsonl":
        assert refusal(lambda: prepared(source, tmp_path / "out", column=wrong)).code == "data.bad_line"
    else:
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(order(source, tmp_path / "out", column=wrong), lambda _: None, interrupt)
    assert (tmp_path / "out" / "prepare.json").exists()
    prepared(source, tmp_path / "out", column="content")
    prepared(source, tmp_path / "straight", column="content")
    assert content(tmp_path / "out") == content(tmp_path / "straight")


@pytest.mark.slow
def test_another_number_of_processes_goes_on_with_it(corpus: Path, begun: Path, tmp_path: Path) -> None:
    prepared(corpus, begun, workers=1)
    prepared(corpus, tmp_path / "straight")
    assert content(begun) == content(tmp_path / "straight")


@pytest.mark.slow
def test_a_text_is_not_looked_through_for_separators_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "books.txt", tmp_path / "out"
    source.write_text("<|endoftext|>\n".join(f"Book {i}.\n" + WORDS * 2000 for i in range(8)))

    def stop(figures: dict[str, int]) -> None:
        if figures["tasks"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(order(source, out, val_fraction=0.3), lambda _: None, stop)
    monkeypatch.setattr(opening, "look_through", None)
    prepared(source, out, val_fraction=0.3)
    assert json.loads((out / "data.json").read_bytes())["source"]["documents"] == 8


@pytest.mark.slow
def test_two_prepares_into_one_folder_are_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert refusal(lambda: prepared(corpus, out)).code == "prepare.busy"
    finally:
        os.close(descriptor)
    prepared(corpus, out)


@pytest.mark.slow
def test_a_second_one_that_is_refused_leaves_the_first_its_folder(tmp_path: Path) -> None:
    """It is empty while the first looks through a large text, or downloads one."""
    with folders.held(tmp_path / "out"):
        with pytest.raises(Refusal, match="Another prepare"), folders.held(tmp_path / "out", patience_s=0):
            pass
        assert (tmp_path / "out").is_dir()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_folder_that_went_with_who_held_it_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = folders._locked, [(tmp_path / "out").rmdir]
    monkeypatch.setattr(folders, "_locked", lambda descriptor: (left and left.pop()(), real(descriptor))[1])
    with folders.held(tmp_path / "out"):
        assert (tmp_path / "out").is_dir()
        with pytest.raises(Refusal, match="Another prepare"), folders.held(tmp_path / "out", patience_s=0):
            pass


@pytest.mark.slow
def test_asked_for_again_a_finished_folder_is_left_as_it_is(corpus: Path, tmp_path: Path) -> None:
    made = prepared(corpus, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = prepared(corpus, tmp_path / "out")
    assert (made["made"], again["made"]) == (True, False)
    assert again["data"] == made["data"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    (corpus / "0.jsonl").write_text(json.dumps({"text": WORDS}) + "\n")
    assert refusal(lambda: prepared(corpus, tmp_path / "out")).code == "data.out_in_use"


@pytest.mark.slow
def test_a_folder_with_other_things_in_it_is_not_written_into(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    assert refusal(lambda: prepared(corpus, tmp_path / "out")).code == "data.out_in_use"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.slow
@pytest.mark.parametrize("out", ["notes.txt", "notes.txt/shards", "nowhere"])
def test_an_out_that_can_be_no_folder_is_refused_and_nothing_is_said_to_be_finished(
    corpus: Path, tmp_path: Path, out: str
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone" / "far")
    found = refusal(lambda: prepared(corpus, tmp_path / out))
    assert (found.code, "--out" in found.hint) == ("data.out_unusable", True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["corpus", "corpus/../corpus", "link"])
def test_a_folder_within_the_source_is_refused_whatever_way_it_is_named(corpus: Path, tmp_path: Path, way: str) -> None:
    (tmp_path / "link").symlink_to(corpus)
    for source, out in ((corpus, tmp_path / way), (tmp_path / way, corpus)):
        assert refusal(lambda: prepared(source, out / "shards")).code == "data.out_in_source"  # noqa: B023
    assert not (corpus / "shards").exists()
    (tmp_path / "loop").symlink_to("loop")
    assert refusal(lambda: prepared(tmp_path / "loop", tmp_path / "out")).code == "data.missing"


@pytest.mark.slow
@pytest.mark.parametrize("other", ["[1]", '{"source": "web"}', "{", "null"])
def test_another_programs_data_json_is_left_alone(corpus: Path, tmp_path: Path, other: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "data.json").write_text(other)
    assert refusal(lambda: prepared(corpus, tmp_path / "out")).code == "data.out_in_use"
    assert (tmp_path / "out" / "data.json").read_text() == other


@pytest.mark.slow
def test_what_somebody_put_into_the_folder_meanwhile_is_never_removed(corpus: Path, begun: Path) -> None:
    (begun / "notes.txt").write_text("mine")
    assert refusal(lambda: prepared(corpus, begun, least_train_tokens=10**9)).code == "data.too_small"
    assert [path.name for path in begun.iterdir()] == ["notes.txt"]
    (begun / "notes.txt").unlink()
    prepared(corpus, begun)
    (begun / "logs").mkdir()
    assert prepared(corpus, begun)["made"] is False
    assert (begun / "logs").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{}, {"dedupe": Dedupe(("url",))}, {"tokenizer": "char"}], ids=str)
def test_a_disk_too_small_is_said_before_starting_with_the_number(
    asked: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the pass that looks for duplicates too, and before the one that counts characters."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 100_000))
    said: list[str] = []
    found = refusal(lambda: prepare_corpus(order(corpus, tmp_path / "out", **asked), said.append, said.append))
    assert found.code == "disk.too_small"
    assert "The shards need about" in found.message
    assert "has 0.1 MB free" in found.message
    assert not any("duplicates" in str(line) or "counting" in str(line) or "done_bytes" in line for line in said)
    assert not records(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("left", [f"{UNFINISHED}000007-killed/train_000008.bin", "dedupe/.signatures-000007.bin-99"])
def test_what_a_killed_one_left_half_done_takes_no_room_from_the_one_that_goes_on(
    corpus: Path, begun: Path, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (begun / left).parent.mkdir()
    (begun / left).write_bytes(b"")
    os.truncate(begun / left, 10**9)

    def usage(folder: Path) -> Any:
        taken = sum(path.stat().st_size for path in begun.rglob("*") if path.is_file())
        return SimpleNamespace(free=10**9 - taken)

    monkeypatch.setattr(room.shutil, "disk_usage", usage)
    assert prepared(corpus, begun)["made"] is True


@pytest.mark.slow
def test_what_is_said_of_the_disk_is_near_what_is_taken(corpus: Path, tmp_path: Path) -> None:
    said: list[str] = []
    prepare_corpus(order(corpus, tmp_path / "out"), said.append, lambda _: None)
    (line,) = [line for line in said if "need about" in line]
    taken = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.bin"))
    assert 0.8 * taken < float(line.split("about ")[1].split(" MB")[0]) * 1e6 < 1.6 * taken


@pytest.mark.slow
def test_a_disk_that_fails_half_way_is_named_and_what_is_finished_stays(tmp_path: Path) -> None:
    source, out = large(tmp_path / "corpus"), tmp_path / "out"
    line = f"ulimit -f 1000; exec {sys.executable} -m trainer.prepare.corpora --source {source} --out {out} --workers 2"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, "disk.write_failed")
    assert "What is finished stays" in error["message"]
    assert (out / "prepare.json").exists()
    assert not list(out.glob(f"{UNFINISHED}*"))
    again = started(source, out, **{"val-fraction": 0.005, "shard-tokens": 100_000_000})
    _, talk = again.communicate(timeout=60)
    assert again.returncode == 0, talk


@pytest.mark.parametrize("least", [{"least_train_tokens": 10**6}, {"least_val_tokens": 10**6}])
def test_a_corpus_smaller_than_a_batch_is_refused_and_leaves_nothing(
    corpus: Path, tmp_path: Path, least: dict[str, int]
) -> None:
    found = refusal(lambda: prepared(corpus, tmp_path / "out", **least))
    assert found.code == "data.too_small"
    assert "1,000,000" in found.message
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert refusal(lambda: prepared(tmp_path / "none", tmp_path / "out")).code == "data.empty"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the tree's memory is told by /proc")
def test_memory_does_not_depend_on_the_corpus_nor_on_its_largest_document(tmp_path: Path) -> None:
    """A line of 5 MB with a character that makes a string four times as large, a text without line ends, one large
    row group: with two processes the whole tree stays below 500 MB."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "corpus"
    folder.mkdir()
    story = "".join(f"{WORDS[: i % 80]}{i} \U0001f600 " for i in range(90_000))
    (folder / "a.jsonl").write_text((json.dumps({"text": story}, ensure_ascii=False) + "\n") * 2)
    (folder / "b.txt").write_text(story.replace("\n", " "))
    rows = [story[start : start + 3000] for start in range(0, len(story) * 3 // 4, 3000)]
    parquet.write_table(arrow.table({"text": rows}), folder / "c.parquet", row_group_size=10**6)
    running = started(folder, tmp_path / "out", workers=2)
    peak = 0
    while running.poll() is None:
        peak = max(peak, tree_bytes(running.pid))
        time.sleep(0.02)
    _, talk = running.communicate()
    assert running.returncode == 0, talk
    assert 50e6 < peak < 500e6


def test_the_program_answers_in_json_and_tells_how_far_it_is(corpus: Path, tmp_path: Path) -> None:
    done = started(corpus, tmp_path / "out")
    answer, talk = done.communicate(timeout=60)
    assert json.loads(answer)["data"]["train_tokens"] > 10**5
    told = [json.loads(line.removeprefix("progress ")) for line in talk.splitlines() if line.startswith("progress ")]
    assert told[0]["done_bytes"] == 0
    assert told[-1]["done_bytes"] == told[-1]["total_bytes"]
    assert told[-1]["tasks"] == told[-1]["total_tasks"]
    refused = started(tmp_path / "nowhere", tmp_path / "out2")
    answer, _ = refused.communicate(timeout=60)
    assert (refused.returncode, json.loads(answer)["error"]["code"]) == (2, "data.missing")
