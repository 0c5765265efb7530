"""Our ends of a datatrove pipeline: a reader of our sources, and the sink that writes our shards.

    steps = [JsonlReader("s3://bucket/texts"), GopherQualityFilter(), ShardSink("/shared/out", "gpt2")]
    SlurmPipelineExecutor(steps, tasks=500, time="04:00:00", partition="cpu", logging_dir="/shared/logs").run()
    finish("/shared/out", tasks=500)        # when all of them have ended

A rank's documents become one training shard and one held-out shard, the same to the byte on every executor; a rank
that was done is not done again. The folder must be the same one for all machines. docs/DATA.md shows it whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datatrove.data import Document, DocumentsPipeline
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from trainer.prepare.corpora.division import Task
from trainer.prepare.corpora.jobs import TaskWriter, TextJob
from trainer.prepare.corpora.resume import remove
from trainer.prepare.corpora.task import UNFINISHED
from trainer.prepare.corpora.vocabulary import keep_vocabulary
from trainer.prepare.errors import Refusal
from trainer.prepare.manifest import finish_folder
from trainer.prepare.shards import read_vocabulary
from trainer.prepare.sources.reading import read_spans
from trainer.prepare.texts import Text, mended
from trainer.prepare.tokenizers import tokenizer_of

__all__ = ["CorpusReader", "JobSink", "ShardSink", "finish", "run_local", "run_ray"]

_RAY_GB = 1.0


class CorpusReader(PipelineStep):
    """Reads one task of a division a rank."""

    type, name = "📖 - READER", "gpurun's sources"

    def __init__(self, tasks: Sequence[tuple[int, Task]], column: str, unpack_in: Path) -> None:
        super().__init__()
        self.tasks, self.column, self.unpack_in = list(tasks), column, unpack_in

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the rank's documents."""
        for text in read_spans(self.tasks[rank][1], self.column, self.unpack_in):
            about = {"url": text.url} if text.url else {}
            # What goes on with a long document: the sink puts it together again.
            more = {"continues": True} if text.continues else {}
            document = Document(text=text.text, id=text.name, metadata={**about, **more})
            self.update_doc_stats(document)
            yield document


class JobSink(PipelineStep):
    """Has a job done with each rank's documents; rank r is the task `indexes[r]`. The job must be picklable."""

    type, name = "💽 - WRITER", "gpurun's shards"

    def __init__(self, job: TextJob, indexes: Sequence[int] = ()) -> None:
        super().__init__()
        self.job, self.indexes = job, list(indexes)

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Take the rank's documents, unless it was done before; nothing comes after it."""
        index = self.indexes[rank] if self.indexes else rank
        with self.track_time(unit="task"):
            if self.job.result(index) is None:
                self.job.open()(index, map(_text, data), lambda count: self.stat_update("progress", value=count))


class ShardSink(JobSink):
    """Writes the shards of rank r as task r, whatever comes before it in the pipeline.

    `tokenizer` is "gpt2", or the name of that whose vocab.json lies in the folder already. `identity` names what the
    documents depend on, so that ranks done from others are not taken for these.
    """

    def __init__(self, folder: str | Path, tokenizer: str, val_fraction: float = 0.005, identity: str = "") -> None:
        place = Path(folder).absolute()
        place.mkdir(parents=True, exist_ok=True)
        keep_vocabulary(place, tokenizer)
        super().__init__(TaskWriter(place, tokenizer, val_fraction, identity))


def finish(folder: str | Path, tasks: int, identity: str = "") -> dict[str, Any]:
    """Write data.json over the shards of so many ranks, and return it; a Refusal names the first that is not done."""
    place = Path(folder).absolute()
    name = json.loads((place / "vocab.json").read_bytes())["name"]
    job = TaskWriter(place, name, 0.0, identity)
    records = []
    for index in range(tasks):
        record = job.result(index)
        if record is None:
            raise Refusal(
                "prepare.task_failed",
                f"Rank {index} of {tasks} has no sound shards in {place}.",
                hint="Run the pipeline again: what is done is not done again. Its logging_dir says what went wrong.",
            )
        records.append(record)
    manifest = finish_folder(place, tokenizer_of(name, read_vocabulary(place)), records, {"kind": "datatrove"})
    # Nothing else that lies there is known to be ours: logs may be.
    remove([*place.glob("task-*.json"), *place.glob(f"{UNFINISHED}*")])
    return manifest


def run_local(steps: list[PipelineStep], tasks: int, workers: int, logs: Path) -> None:
    """Run a pipeline on datatrove's executor for this machine."""
    workers = min(workers, tasks)
    LocalPipelineExecutor(steps, tasks=tasks, workers=workers, logging_dir=str(logs), skip_completed=False).run()


def run_ray(steps: list[PipelineStep], tasks: int, workers: int, logs: Path) -> None:
    """Run a pipeline on Ray: the cluster that RAY_ADDRESS names, else this machine."""
    import ray
    from datatrove.executor.ray import RayPipelineExecutor

    if not ray.is_initialized():
        # The trainer need not be installed: it lies where this process has it from.
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}}, include_dashboard=False, log_to_driver=False)
    settings = {"logging_dir": str(logs), "skip_completed": False, "mem_per_cpu_gb": _RAY_GB}
    RayPipelineExecutor(steps, tasks=tasks, workers=workers, **settings).run()


def _text(document: Document) -> Text:
    about = document.metadata
    url = mended(str(about.get("url") or ""))
    return Text(document.id, mended(document.text), url, bool(about.get("continues")))
