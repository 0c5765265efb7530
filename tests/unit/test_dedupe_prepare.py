"""Tests of `--dedupe` in a whole prepare: dropped documents are in no shard, and no signature is lost by a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import UsageError
from gpurun.data.dedupe.signatures import Dedupe
from gpurun.data.prepare import PrepareOrder, prepare

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORDS = [f"word{number}" for number in range(3000)]
DEDUPLICATED = """
import pathlib, sys
from gpurun.data.dedupe.signatures import Dedupe
from gpurun.data.prepare import PrepareOrder, prepare
prepare(PrepareOrder(sys.argv[1], "char", pathlib.Path(sys.argv[2]), 0.2, dedupe=Dedupe()), print)
"""


def write_rows(path: Path, seeds: Sequence[int], words: int = 300) -> Path:
    """Write JSON Lines with a text and an address for each seed; return the path."""
    with open(path, "w") as file:
        for seed in seeds:
            text = " ".join(random.Random(seed).choices(WORDS, k=words))
            file.write(json.dumps({"text": text, "url": f"https://example.org/{seed}"}) + "\n")
    return path


def prepared(source: Path, out: Path, workers: int = 1, **settings: Any) -> dict[str, Any]:
    order = PrepareOrder(str(source), out=out, **{"tokenizer": "char", "val_fraction": 0.2} | settings)
    return prepare(order, print, workers=workers).manifest


def test_shards_hold_every_document_once(tmp_path: Path) -> None:
    once = prepared(write_rows(tmp_path / "once.jsonl", range(60)), tmp_path / "1")
    twice = write_rows(tmp_path / "twice.jsonl", [*range(60), *range(40)])
    kept = prepared(twice, tmp_path / "2")
    cleaned = prepared(twice, tmp_path / "3", dedupe=Dedupe(), workers=2)
    assert cleaned["train"] == once["train"]
    assert cleaned["val"] == once["val"]
    assert (kept["source"]["documents"], cleaned["source"]["documents"]) == (100, 60)
    assert cleaned["source"]["dropped"] == 40
    assert sorted(path.name for path in (tmp_path / "3").iterdir()) == sorted(
        path.name for path in (tmp_path / "1").iterdir()
    )


def test_another_choice_of_duplicates_is_another_preparation(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", range(40))
    prepared(source, tmp_path / "out", dedupe=Dedupe(("exact",)))
    with pytest.raises(UsageError) as refused:
        prepared(source, tmp_path / "out", dedupe=Dedupe(("near",)))
    assert refused.value.code == "data.out_in_use"


def test_a_trained_vocabulary_is_the_same_on_any_processes(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", range(80))
    made = {"tokenizer": "bpe", "vocab_size": 500}
    found = [prepared(source, tmp_path / str(workers), workers, **made) for workers in (1, 2)]
    assert found[0] == found[1]
    assert found[0]["tokenizer"]["vocab_size"] == 500
    assert found[0]["train"][0]["tokens"] < 80 * 300 * 3


@pytest.mark.slow
def test_a_prepare_killed_while_it_signs_ends_the_same(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for number in range(2):  # Three tasks of at most eight megabytes.
        write_rows(source / f"{number}.jsonl", range(number * 20, number * 20 + 25), words=42_000)
    command = [sys.executable, "-c", DEDUPLICATED, str(source), str(out)]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               start_new_session=True)  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (out / "dedupe" / "signatures-000000.bin").exists():
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    size_mb = sum(path.stat().st_size for path in source.iterdir()) / 1e6
    assert float(again.split("fingerprints of ")[1].split()[0]) < size_mb - 8, "what was signed is not signed again"
    ended = json.loads((out / "data.json").read_bytes())
    assert (ended["source"]["documents"], ended["source"]["dropped"]) == (45, 5)
