"""Tests of finding what a command wrote outside its folder: results are reported, caches and downloads are not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.trainer_events import OutputsEvent, parse_event
from gpurun.remote.agent.runner.elsewhere import LARGE_BYTES, find_results
from gpurun.remote.agent.runner.run_command import count_files, within_a_line

LARGE = LARGE_BYTES + 1
RESULTS = {
    "checkpoints/last.pt": 10,
    ".cache/nanochat/base_checkpoints/d20/model_000100.pt": 10,
    "logs/metrics.jsonl": LARGE,
    "temporary/epoch.ckpt": 10,
}
OTHERS = {
    "notes.txt": 10,
    ".cache/huggingface/hub/models--gpt2/blobs/model.safetensors": LARGE,
    ".cache/torch/hub/checkpoints/resnet50.pth": LARGE,
    ".cache/nanochat/base_data/shard_00000.parquet": LARGE,
    "downloaded/model.safetensors": LARGE,
    "downloaded/.cache/huggingface/download/model.safetensors.metadata": 10,
    "data/cifar-10-python.tar.gz": LARGE,
    "data/cifar-10-batches-py/data_batch_1": LARGE,
    "env/pyvenv.cfg": 10,
    "env/lib/big.pt": LARGE,
    ".gpurun/another/out/model.pt": 10,
    "run/bundle/work/model.pt": 10,
    "temporary/tmpab12cd34/scratch": LARGE,
}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a HOME with files that commands leave there, and a folder for temporary files in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    for name, size in {**RESULTS, **OTHERS}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    return tmp_path


def found(house: Path, *passed_by: str, since_wall: float = 0.0) -> Any:
    return find_results(since_wall, [str(house / name) for name in ("run", *passed_by)], 20.0)


def test_results_are_found_anywhere_except_caches_and_downloads(house: Path) -> None:
    results = found(house)
    assert {entry["name"] for entry in results["first"]} == {f"~/{name}" for name in RESULTS}
    assert (results["files"], results["bytes"], results["is_whole"]) == (4, sum(RESULTS.values()), True)
    assert results["first"][-1]["name"] == "~/logs/metrics.jsonl", "weights come first"


def test_what_was_there_before_or_comes_home_is_not_elsewhere(house: Path) -> None:
    os.utime(house / "logs/metrics.jsonl", (1, 1))
    home = [name for name in RESULTS if name.startswith("checkpoints/")]
    results = found(house, *home, "temporary", since_wall=time.time() - 3600)
    assert [entry["name"] for entry in results["first"]] == ["~/.cache/nanochat/base_checkpoints/d20/model_000100.pt"]


def test_no_link_leads_out_and_no_file_that_is_none_is_counted(house: Path) -> None:
    (house / "far").symlink_to("/etc")
    (house / "linked.pt").symlink_to("/etc/hostname")
    os.mkfifo(house / "pipe.pt")
    assert found(house)["files"] == len(RESULTS)


def test_a_list_of_long_names_fits_into_a_line_that_is_read() -> None:
    files = [("模" * 400, 1)] * 50
    lists = {name: count_files(files) for name in ("published", "unpublished", "elsewhere", "left_behind")}
    line = {**within_a_line(lists), "kind": "outputs"}
    event = parse_event(json.dumps(line))
    assert isinstance(event, OutputsEvent)
    assert (event.elsewhere.files, event.elsewhere.bytes) == (50, 50)
