"""Provides the first and last step of a datatrove pipeline, for a corpus that needs several machines.

    order = PrepareOrder("/shared/texts", "gpt2", Path("/shared/out"))
    begun = begin_preparing(order, print)                              # inspects the source, once
    steps = [TaskReader(begun.left, order.layout), Doing(begun.writer, begun.left)]
    SlurmPipelineExecutor(steps, tasks=len(begun.left), time="04:00:00", partition="cpu", logging_dir="/logs").run()
    finish_preparing(order, begin_preparing(order, print), print)      # when all tasks have ended

datatrove's own filters can be put between the two steps. A task's documents become the same shards on every executor,
and a finished task is not repeated. All machines must use the same folder (docs/DATA.md shows the whole program).
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpurun.core.errors import SetupError
from gpurun.core.installed_files import install_line
from gpurun.data.documents import documents_of
from gpurun.data.layout import Layout
from gpurun.data.rows import replace_surrogates
from gpurun.data.source_file import Document
from gpurun.data.tasks import Task, Work

try:
    from datatrove.data import Document as Passed
    from datatrove.data import DocumentsPipeline
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.base import PipelineStep
except ImportError as missing:
    raise SetupError(
        "prepare.not_installed",
        f"--executor datatrove needs {missing.name}.",
        hint=f"{install_line('data')}; or leave --executor out.",
    ) from None

_RAY_GB = 1.0


class TaskReader(PipelineStep):
    """The first step: reads the documents of one task per rank."""

    type, name = "📖 - READER", "gpurun's sources"

    def __init__(self, tasks: Sequence[tuple[int, Task]], layout: Layout) -> None:
        super().__init__()
        self.tasks, self.layout = list(tasks), layout

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the rank's documents."""
        for document in documents_of(self.tasks[rank][1], self.layout):
            passed = Passed(document.text, document.name, metadata=_metadata(document))
            self.update_doc_stats(passed)
            yield passed


class Doing(PipelineStep):
    """The last step: processes the documents of each rank."""

    type, name = "💽 - WRITER", "gpurun's shards"

    def __init__(self, work: Work, tasks: Sequence[tuple[int, Task]]) -> None:
        super().__init__()
        self.work, self.indexes = work, [index for index, _ in tasks]

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Process the rank's documents."""
        with self.track_time(unit="task"):
            self.work.do(self.indexes[rank], map(_document, data), lambda count: None)


def _metadata(document: Document) -> dict[str, Any]:
    return {"url": document.url, "begins": document.begins, "held_out": document.held_out}


def _document(passed: Passed) -> Document:
    about = passed.metadata
    url = replace_surrogates(str(about.get("url") or ""))
    begins, held_out = bool(about.get("begins", True)), bool(about.get("held_out"))
    return Document(passed.id, replace_surrogates(passed.text), url, begins=begins, held_out=held_out)


def run_datatrove(work: Work, tasks: Sequence[tuple[int, Task]], workers: int, executor: str) -> None:
    """Run the tasks on datatrove's executor for this machine, or on Ray (RAY_ADDRESS names the cluster)."""
    if not tasks:
        return
    steps = [TaskReader(tasks, work.layout), Doing(work, tasks)]
    with (
        tempfile.TemporaryDirectory(prefix="gpurun-datatrove-") as logs,
        _redirect_errors_into(Path(logs) / "executor.log"),
    ):
        settings: dict[str, Any] = {"tasks": len(tasks), "workers": min(workers, len(tasks))}
        settings |= {"logging_dir": logs, "skip_completed": False}
        if executor == "ray":
            _ray_executor(steps, settings).run()
        else:
            LocalPipelineExecutor(steps, **settings).run()


def _ray_executor(steps: list[PipelineStep], settings: dict[str, Any]) -> Any:
    try:
        import ray
        from datatrove.executor.ray import RayPipelineExecutor
    except ImportError as error:
        hint = f"{install_line('ray')}; or leave --executor out."
        raise SetupError("prepare.not_installed", f"--executor ray needs {error.name}.", hint=hint) from None
    if not ray.is_initialized():
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, sys.path)])
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}}, include_dashboard=False, log_to_driver=False)
    return RayPipelineExecutor(steps, mem_per_cpu_gb=_RAY_GB, **settings)


@contextlib.contextmanager
def _redirect_errors_into(log: Path) -> Iterator[None]:
    """Redirect standard error to a file beside the logs, also for processes that are started meanwhile."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
