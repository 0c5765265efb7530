"""Tests that every executor makes the same bytes, also with datatrove's steps between gpurun's reader and writer."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.data import prepare as pipeline
from gpurun.data.dedupe.signatures import Dedupe
from gpurun.data.prepare import BegunPreparation, finish_preparing, prepare
from gpurun.data.shard_folder import inspect
from gpurun.data.workers import require_known_executor
from tests.refusals import refusal
from tests.unit.executors import WORDS, begun_of, content, order, steps


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a folder of four JSON Lines files that share some rows."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(4):
        with open(folder / f"{number}.jsonl", "w") as file:
            for seed in range(number * 40, number * 40 + 50):
                text = " ".join(random.Random(seed).choices(WORDS, k=200))
                file.write(json.dumps({"text": text, "url": f"https://example.org/{seed}"}) + "\n")
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_from_tiktoken", lambda: None)


@pytest.mark.filterwarnings("ignore:placement_group:DeprecationWarning")
@pytest.mark.process
@pytest.mark.parametrize("executor", ["datatrove", pytest.param("ray", marks=pytest.mark.slow)])
def test_without_duplicates_every_executor_gives_the_same_bytes(
    tmp_path: Path, corpus: Path, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ours = prepare(order(corpus, tmp_path / "ours", dedupe=Dedupe()), print)
    try:
        prepare(order(corpus, tmp_path / "theirs", dedupe=Dedupe()), print, workers=2, executor=executor)
    finally:
        if executor == "ray":
            pytest.importorskip("ray", reason="the extra ray").shutdown()
    assert content(tmp_path / "theirs") == content(tmp_path / "ours")
    assert (ours.manifest["source"]["documents"], ours.manifest["source"]["dropped"]) == (170, 30)
    assert len(ours.manifest["train"]) == 5


SBATCH = """#!/bin/bash
# A cluster of one machine: does the ranks of an array one after the other.
script="${@: -1}"
for argument in "$@"; do case "$argument" in --export=*) export "${argument##*,}";; esac; done
export SLURM_JOB_ID=1 SLURM_NODELIST=localhost
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
[ -n "$last" ] && for rank in $(seq 0 "$last"); do SLURM_ARRAY_TASK_ID=$rank bash "$script" >&2; done
echo "Submitted batch job 1"
"""
SRUN = """#!/bin/bash
while [ "$1" != launch_pickled_pipeline ]; do shift; done
exec "$@"
"""


@pytest.mark.slow
def test_datatroves_slurm_jobs_make_the_same_shards_to_the_byte(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", "#!/bin/bash\necho localhost\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for name in ("2.jsonl", "3.jsonl"):
        (corpus / name).unlink()
    wanted, settings = order(corpus, tmp_path / "slurm"), {"time": "01:00:00", "partition": "cpu", "job_name": "shards"}
    begun = begun_of(wanted)
    SlurmPipelineExecutor(steps(begun), tasks=len(begun.left), logging_dir=str(tmp_path / "logs"), **settings).run()
    finish_preparing(wanted, begun_of(wanted), print)
    prepare(order(corpus, tmp_path / "ours"), print)
    assert content(tmp_path / "slurm") == content(tmp_path / "ours")


def run_locally(begun: BegunPreparation, logs: Path, *between: Any, **settings: Any) -> None:
    made = LocalPipelineExecutor(
        steps(begun, *between), tasks=len(begun.left), workers=1, logging_dir=str(logs), **settings
    )
    made.run()


def test_filters_of_datatroves_own_go_between_the_two_ends(tmp_path: Path, corpus: Path) -> None:
    wanted = order(corpus, tmp_path / "out")
    begun = begun_of(wanted)
    run_locally(begun, tmp_path / "logs", LambdaFilter(lambda passed: not passed.metadata["url"].endswith("7")))
    made = finish_preparing(wanted, begun_of(wanted), print)
    assert made.manifest["source"]["documents"] == 180
    assert inspect(tmp_path / "out", tokenizer="gpt2", vocab_size=50257).train_tokens > 1000
    assert not list((tmp_path / "out").glob("task-*"))


def test_a_done_part_is_not_redone_and_an_undone_one_is_named(tmp_path: Path, corpus: Path) -> None:
    wanted = order(corpus, tmp_path / "out")
    run_locally(begun_of(wanted), tmp_path / "logs", local_tasks=1)
    begun = begun_of(wanted)
    assert [index for index, _ in begun.left] == [1, 2, 3, 4]
    with refusal(UsageError, "prepare.task_failed", "Part 1", "5 has"):
        finish_preparing(wanted, begun, print)
    first = (tmp_path / "out" / "train_000001.bin").stat().st_mtime_ns
    run_locally(begun, tmp_path / "other logs")
    assert (tmp_path / "out" / "train_000001.bin").stat().st_mtime_ns == first
    finish_preparing(wanted, begun_of(wanted), print)
    prepare(order(corpus, tmp_path / "ours"), print)
    assert content(tmp_path / "out") == content(tmp_path / "ours")


@pytest.mark.parametrize("executor", ["processes", "datatrove"])
def test_what_is_wrong_with_a_row_is_told_by_whoever_meets_it(
    tmp_path: Path, corpus: Path, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_FEW_BYTES", 0)  # A small corpus would be read before the executor starts.
    with open(corpus / "2.jsonl", "a") as file:
        file.write("no object\n")
    with refusal(UsageError, "data.bad_line", "2.jsonl"):
        prepare(order(corpus, tmp_path / "out"), print, workers=2, executor=executor)


def test_an_unknown_or_missing_executor_is_refused_in_words(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as unknown:
        require_known_executor("dask")
    assert "processes, datatrove, ray" in unknown.value.hint
    monkeypatch.setitem(sys.modules, "ray", None)
    with refusal(SetupError, "prepare.not_installed", "--executor") as refused:
        prepare(order(corpus, tmp_path / "out"), print, executor="ray")
    assert "[ray]" in refused.value.hint
