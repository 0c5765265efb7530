"""Tests of `gpurun data`: `prepare` makes shards that a run uses unchanged, and `inspect` names their faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import UsageError
from gpurun.data.run_shards import prepare_run_shards
from gpurun.data.shard_folder import inspect_data
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.view.shard_lines import progress_line
from gpurun.view.style import Style
from gpurun.view.styled_text import render
from tests.unit.data_verbs import WORDS, gpurun


def texts(folder: Path, count: int = 60) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"Document {number}.\n" + WORDS * (1 + number % 9))
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a folder that `gpurun data prepare` made, and the verb's JSON answer."""
    place = tmp_path_factory.mktemp("made")
    arguments = ["--source", str(texts(place / "in")), "--out", str(place / "out"), "--val-fraction", "0.2", "--json"]
    done = gpurun("data", "prepare", "mini-gpt", *arguments, home=place / "home")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return place / "out", json.loads(done.stdout)


def copied(shards: tuple[Path, dict[str, Any]], into: Path) -> Path:
    into.mkdir()
    for path in shards[0].iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    return into


def refused(folder: Path) -> str:
    with pytest.raises(UsageError) as raised:
        inspect_data(folder)
    return raised.value.code


def test_what_was_prepared_is_told_and_is_what_inspect_finds(
    shards: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, answer = shards
    assert answer["command"] == "data prepare"
    looked = json.loads(gpurun("data", "inspect", str(folder), "--json", home=tmp_path).stdout)["data"]
    for key in ("tokenizer", "tokenizer_sha256", "vocab_size", "train_tokens", "val_tokens", "bytes"):
        assert looked[key] == answer["data"][key]
    assert (looked["about"]["documents"], looked["eot"], looked["dtype"]) == (60, "none", "uint16")
    shown = gpurun("data", "inspect", str(folder), home=tmp_path).stdout
    assert "60 documents" in shown
    assert "held out" in shown


def test_a_run_takes_the_folder_as_its_data(shards: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    record = resolve(load_recipe("mini-gpt"), "rehearsal").record
    places = {"into": tmp_path / "beside", "cache": tmp_path / "cache"}
    found = prepare_run_shards(record, str(shards[0]), **places, say=lambda _: None)
    assert found.train_tokens == shards[1]["data"]["train_tokens"]
    assert (tmp_path / "beside" / "prompts.json").exists()


def test_a_vocabulary_that_is_not_the_shards_is_refused(shards: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = copied(shards, tmp_path / "s")
    vocabulary = json.loads((folder / "vocab.json").read_text())
    vocabulary["tokens_b64"].reverse()
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    assert refused(folder) == "data.other_tokenizer"


def test_a_shard_with_one_byte_changed_is_refused(shards: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = copied(shards, tmp_path / "s")
    path = folder / "train_000001.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    assert refused(folder) == "data.digest"


def test_an_unfinished_folder_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "prepare.json").write_text("{}")
    assert refused(tmp_path) == "data.unfinished"
    assert refused(tmp_path / "nowhere") == "data.unreadable"


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["annotated-transformer"], "data.parallel", "gpurun train"),
        (["gpt2-124m-owt"], "data.no_source", "--source"),
        (["mini-gpt", "--source", "/nowhere"], "data.missing", "path"),
        (["mini-gpt", "--val-fraction", "1.5"], "usage.val_fraction", "0.005"),
        (["mini-gpt", "--workers", "-1"], "usage.workers", "1"),
        (["mini-gpt", "--val-fraction", "-1e-05"], "usage.val_fraction", "0.005"),
        (["mini-gpt", "--shard-tokens", "3000000000"], "usage.shard_tokens", "1,000,000,000"),
        (["mini-gpt", "--source", __file__, "--dedupe=-x"], "dedupe.kind", "url"),
        (["mini-gpt", "--similarity", "0.8"], "usage.similarity", "--dedupe near"),
        (["mini-gpt", "--similarity", "0.8", "--dedupe", "url"], "usage.similarity", "--dedupe url,near"),
    ],
)
def test_what_cannot_be_prepared_is_refused_in_json(arguments: list[str], code: str, hint: str, tmp_path: Path) -> None:
    done = gpurun("data", "prepare", *arguments, "--out", str(tmp_path / "out"), "--json", home=tmp_path)
    (error,) = json.loads(done.stdout)["errors"]
    assert (done.returncode, error["code"]) == (2, code)
    assert hint in error["hint"]
    assert not (tmp_path / "out").exists()


def test_a_keyboard_interrupt_ends_it_and_says_it_can_continue(tmp_path: Path) -> None:
    source = texts(tmp_path / "in", 1500)
    command = [sys.executable, "-m", "gpurun.cli.app", "data", "prepare", "gpt2-124m", "--source", str(source)]
    command += ["--out", str(tmp_path / "out"), "--home", str(tmp_path / "home"), "--val-fraction", "0.2"]
    running = subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 30
    while not (tmp_path / "out" / "prepare.json").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=20)
    assert running.returncode == 130
    assert "repeat" in said
    assert "Traceback" not in said


def test_an_early_refusal_follows_no_line_about_nothing_done(tmp_path: Path) -> None:
    source = tmp_path / "late.jsonl"
    source.write_text(f"{json.dumps({'text': WORDS})}\n" * 5000 + "no object\n")
    arguments = ["data", "prepare", "gpt2-124m", "--source", str(source), "--out", str(tmp_path / "out")]
    done = gpurun(*arguments, home=tmp_path / "home")
    assert done.returncode == 2
    assert "data.bad_line" in done.stderr
    assert "0%" not in done.stderr


def test_the_bar_shows_the_share_the_rate_and_the_time_left() -> None:
    figures = {
        "done_bytes": 60_000_000,
        "total_bytes": 100_000_000,
        "tokens": 15_000_000,
        "tasks": 6,
        "total_tasks": 10,
    }
    line = render([progress_line(figures, elapsed_s=10.0, done_before=40_000_000, style=Style())], Style())
    assert " 60%" in line
    assert "15 M tokens" in line
    assert "6/10 shards" in line
    assert "2 MB/s" in line
    assert "20 s left" in line
    assert len(line) <= 80
