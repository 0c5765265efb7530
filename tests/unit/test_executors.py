"""A corpus gives the same shards to the byte on every executor; of a datatrove pipeline only the sink is ours."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import ParquetReader

from gpurun.data.run_shards import inspect
from trainer.prepare import tokenizers
from trainer.prepare.corpora import __main__ as program
from trainer.prepare.corpora.datatrove_steps import ShardSink, finish
from trainer.prepare.corpora.division import divide
from trainer.prepare.corpora.executors import Executor
from trainer.prepare.corpora.jobs import TaskWriter
from trainer.prepare.corpora.pipeline import Order, prepare_corpus
from trainer.prepare.corpora.vocabulary import keep_vocabulary
from trainer.prepare.dedupe.signatures import Dedupe
from trainer.prepare.errors import Refusal
from trainer.prepare.sources.opening import open_source

WORDS = [f"word{number}" for number in range(2000)]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_from_tiktoken", lambda: None)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Four files of rows, some rows twice."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(4):
        with open(folder / f"{number}.jsonl", "w") as file:
            for seed in range(number * 40, number * 40 + 50):
                text = " ".join(random.Random(seed).choices(WORDS, k=200))
                file.write(json.dumps({"text": text, "url": f"https://example.org/{seed}"}) + "\n")
    return folder


def shards(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.bin"))}


def written(corpus: Path, out: Path, kind: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Each file as a task of its own, done by that executor, two at a time: the shards' digests, and the records."""
    out.mkdir()
    keep_vocabulary(out, "gpt2")
    files = open_source(str(corpus), "text", lambda _: None, {}).files
    tasks = [(index, divide([file])[0]) for index, file in enumerate(files)]
    done = dict(Executor(kind, 2, "text", out).work(TaskWriter(out, "gpt2", 0.2), tasks, lambda *_: None))
    return shards(out), [done[index] for index in range(len(tasks))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:placement_group:DeprecationWarning")
def test_shards_are_the_same_to_the_byte_on_datatroves_executors_for_this_machine_and_for_ray(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="the extra ray")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ours = written(corpus, tmp_path / "ours", "processes")
    assert len(ours[0]) == 8
    assert written(corpus, tmp_path / "datatrove", "datatrove") == ours
    try:
        assert written(corpus, tmp_path / "ray", "ray") == ours
    finally:
        ray.shutdown()


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
def test_shards_are_the_same_to_the_byte_from_jobs_as_datatrove_gives_them_to_slurm(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (tmp_path / "parquet").mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", "#!/bin/bash\necho localhost\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for name in ("2.jsonl", "3.jsonl"):
        (corpus / name).unlink()
    out, settings = tmp_path / "slurm", {"time": "01:00:00", "partition": "cpu", "job_name": "shards"}
    for file in corpus.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parquet" / f"{file.stem}.parquet")
    steps = [ParquetReader(str(tmp_path / "parquet")), ShardSink(out, "gpt2", 0.2)]
    SlurmPipelineExecutor(steps, tasks=2, logging_dir=str(tmp_path / "logs"), **settings).run()
    assert shards(out) == written(corpus, tmp_path / "ours", "processes")[0]
    assert finish(out, tasks=2)["source"]["documents"] == 100


def test_a_whole_prepare_without_duplicates_ends_the_same_on_datatrove(tmp_path: Path, corpus: Path) -> None:
    ended = []
    for kind in ("processes", "datatrove"):
        out, told = tmp_path / kind, []
        order = Order(str(corpus), "gpt2", out, 0.1, dedupe=Dedupe(), executor=kind, workers=2)
        prepare_corpus(order, lambda _: None, told.append)
        assert told[-1]["done_bytes"] == told[-1]["total_bytes"]
        manifest = json.loads((out / "data.json").read_bytes())
        ended.append((shards(out), manifest, sorted(path.name for path in out.iterdir())))
    assert ended[0] == ended[1]
    assert ended[0][1]["source"]["dropped"] == 30
    assert ended[0][2] == ["data.json", "train_000001.bin", "val_000000.bin", "vocab.json"]


class Rows(PipelineStep):
    """A reader as a person may have one: six documents a rank."""

    name, type = "rows", "reader"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        for number in range(6):
            text = f"Document {number} of rank {rank}: " + " ".join(random.Random(rank).choices(WORDS, k=40))
            yield Document(text=text, id=f"{rank}/{number}", metadata={"keep": number != 3})


def run_locally(steps: list[Any], ranks: int, logs: Path, **settings: Any) -> None:
    LocalPipelineExecutor(steps, tasks=ranks, workers=1, logging_dir=str(logs), **settings).run()


def test_documents_of_any_datatrove_pipeline_become_shards_that_train(tmp_path: Path) -> None:
    out = tmp_path / "out"
    steps = [Rows(), LambdaFilter(lambda document: document.metadata["keep"]), ShardSink(out, "gpt2", 0.2)]
    run_locally(steps, 3, out / "logs")
    manifest = finish(out, tasks=3)
    assert manifest["source"]["documents"] == 15
    assert manifest["source"]["kind"] == "datatrove"
    assert inspect(out, tokenizer="gpt2", vocab_size=50257).train_tokens > 1000
    assert not list(out.glob("task-*"))
    assert (out / "logs" / "stats.json").exists()


def test_a_rank_that_was_done_is_not_done_again_and_one_that_was_not_is_named(tmp_path: Path) -> None:
    steps = [Rows(), ShardSink(tmp_path / "out", "gpt2", 0.2)]
    run_locally(steps, 2, tmp_path / "logs", local_tasks=1)
    with pytest.raises(Refusal, match="Rank 1 of 2 has no sound shards"):
        finish(tmp_path / "out", tasks=2)
    first = (tmp_path / "out" / "train_000001.bin").stat().st_mtime_ns
    run_locally(steps, 2, tmp_path / "other logs")
    assert (tmp_path / "out" / "train_000001.bin").stat().st_mtime_ns == first
    finish(tmp_path / "out", tasks=2)


def test_a_vocabulary_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        ShardSink(tmp_path / "out", "bpe")
    assert refused.value.code == "data.no_vocabulary"


def test_an_executor_that_is_none_or_not_installed_is_refused_in_words(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refusal) as refused:
        program._order(["--source", "stdlib", "--out", str(tmp_path / "out"), "--executor", "dask"])
    assert "processes, datatrove, ray" in refused.value.hint
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refusal) as refused:
        written(corpus, tmp_path / "out", "ray")
    assert refused.value.code == "prepare.not_installed"
    assert "'.[ray]'" in refused.value.hint


class Idle:
    """A job that does nothing, so that nothing lies on the disk afterwards."""

    def open(self) -> Any:
        return lambda index, texts, tell: sum(1 for _ in texts)

    def result(self, index: int) -> None:
        return None


def test_a_task_that_an_executor_did_not_do_is_named_with_its_logs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One text.\n")
    source = open_source(str(tmp_path), "text", lambda _: None, {})
    tasks = list(enumerate(divide(source.files)))
    logs = tmp_path / "logs"
    with pytest.raises(Refusal, match="Task 0 of 1 was not done by datatrove") as refused:
        list(Executor("datatrove", 1, "text", tmp_path).work(Idle(), tasks, lambda index, count: None))
    assert str(logs) in refused.value.message
    assert "Processing done for rank=0" in (logs / "logs" / "task_00000.log").read_text(encoding="utf-8")
