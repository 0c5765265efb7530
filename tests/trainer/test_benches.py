"""Tests that the trainer's benchmarks run to their end: a rented GPU's minutes are too costly for debugging."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "bench" / "bench_gpu.py"


def bench(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, str(SCRIPT), *argv], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_every_rival_is_tried_on_the_cpu_from_the_same_weights() -> None:
    pytest.importorskip("accelerate", reason="the Hugging Face Trainer needs accelerate: pip install '.[hf]'")
    done = bench("--try", "--rounds", "1", "--rows", "10m,slow,mfu,loss")
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert [row.split(" | ")[1] for row in rows[:3]] == ["the plain loop", "the Hugging Face Trainer", "the slow way"]
    assert "void" not in done.stdout, "the losses of all agree: the gate that makes a ratio worth anything"
    assert "tokens/s" in rows[3]
    assert "matrix products" in rows[4]
    assert all(way in row for way, row in zip(("by chunks", "step by step", "whole logits"), rows[5:], strict=True))
    assert all("TRIAL, measures nothing" in row for row in rows[:4] + rows[5:]), "none can be taken for a figure"


def test_what_a_checkpoint_costs_is_taken_from_the_real_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    from tests.bench.bench_trainer import ROWS, lost_to_a_checkpoint

    shares = lost_to_a_checkpoint(ROWS["mini"], tmp_path, 2, time.process_time)
    assert len(shares) == 2
    assert len(list(tmp_path.rglob("*.model.safetensors"))) == 2, "a checkpoint a round, on the disk"


def test_without_a_card_nothing_is_measured() -> None:
    done = bench()
    assert done.returncode == 1
    assert "no CUDA card is here" in done.stderr
    assert done.stdout == ""
