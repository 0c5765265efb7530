"""Tests of plans over several nodes: a cluster's plan states the figures, and every other provider refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import gpurun
from tests.emulators.slurm import scripted_slurm
from tests.refusals import lacking


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a home with a cluster of two nodes of eight A100 each."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("GPURUN_HOME", str(home))
    with scripted_slurm(tmp_path) as made:
        (home / "config.toml").write_text(made.table)
        yield home


def planned(gpu: str, *words: str) -> dict[str, Any]:
    """Return the plan of `gpurun plan --json`, or its first error."""
    said = gpurun("plan", "mini-gpt", "--gpu", gpu, "--json", *words)
    answer = json.loads(said.stdout)
    plan: dict[str, Any] = answer["errors"][0] if answer["errors"] else answer["data"]
    return plan


def test_two_nodes_of_eight_cards_are_sixteen_sharing_the_batch(home: Path) -> None:
    plan = planned("2x8xA100", "--provider", "slurm", "--max-gpu-hours", "40")
    assert (plan["offer"]["nodes"], plan["offer"]["gpu_count"], plan["processes"]) == (2, 16, 16)
    assert "70%-95%" in plan["estimate"]["basis"]
    assert any("the 40" in note for note in plan["notes"])
    one = planned("8xA100", "--provider", "slurm")
    assert (one["offer"]["nodes"], one["processes"]) == (1, 8)
    assert one["estimate"]["micro_batch"] == 2 * plan["estimate"]["micro_batch"]  # 8 and 4 of 64 sequences.
    assert planned("2xcpu", "--provider", "slurm")["processes"] == 2


@pytest.mark.parametrize(
    ("gpu", "code", "figures"),
    [
        ("4x8xA100", "slurm.too_few", ("4 nodes", "8 GPUs", "partition main of lab", " 2 ")),
        ("4xcpu", "slurm.too_few", ("4 nodes", "partition main of lab", " 2 ")),
        ("2x16xA100", "slurm.too_few", ("16 GPUs", " 8.")),
        ("2x7xA100", "recipe.does_not_add_up", ("4096", " 64 ", "2 nodes x 7")),
    ],
)
def test_what_a_cluster_lacks_is_counted_out_before_submitting(
    home: Path, gpu: str, code: str, figures: tuple[str, ...]
) -> None:
    refused = planned(gpu, "--provider", "slurm")
    assert (refused["code"], lacking(refused["message"], *figures)) == (code, [])


@pytest.mark.parametrize("provider", ["runpod", "aws", "lambda", "local", "ssh"])
def test_who_joins_no_nodes_refuses_them_in_words(home: Path, provider: str) -> None:
    refused = planned("2x8xA100", "--provider", provider, "--max-cost", "50")
    assert (refused["code"], "--gpu 8xA100" in refused["hint"]) == ("gpu.nodes", True)


def test_a_rehearsal_of_several_nodes_is_one_process_here(home: Path) -> None:
    plan = planned("2x8xA100", "--provider", "slurm", "--dry-run")
    assert (plan["mode"], plan["processes"], plan["offer"]["provider"]) == ("rehearsal", 1, "local")
