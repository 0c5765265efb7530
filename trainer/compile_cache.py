"""Carries the results of torch.compile from one rental to the next: minutes of compiling become seconds of loading.

The file is named after everything that it depends on: torch, triton, CUDA, the GPU, the model, the micro-batch, the
number of processes, how they share the model, and the compiler's mode. Loading it may run code. Therefore it is loaded
only from this machine's data folder, where the user put it, or from the run's own folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import traceback
import zipfile
import zlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from trainer.distributed import Device, Processes
from trainer.events import Reporter
from trainer.recipe import ModelConfig

__all__ = ["FOLDER", "CompileCache", "cache_name"]

FOLDER = "compile-cache"


def cache_name(
    model: ModelConfig, device: Device, micro_batch: int, parallel: str | None, processes: int, mode: str = "default"
) -> str:
    """Return the file's name below `out/` and `data/`; settings that compile differently have different names."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    parts = ["blocks", torch.__version__, triton, torch.version.cuda]
    parts += [device.cuda_name or device.torch.type, device.precision]
    content = json.dumps([*parts, dataclasses.asdict(model), micro_batch, parallel, processes, mode], sort_keys=True)
    return f"{FOLDER}/{hashlib.sha256(content.encode()).hexdigest()[:16]}.bin"


class CompileCache:
    """The file of one run: a zip with a part for each process of the first machine, named by its local rank.

    Each process needs its own part, because compiled code names its GPU. On other machines, processes with the same
    local rank can use the same part.
    """

    def __init__(self, name: str, processes: Processes) -> None:
        self.name = name
        self._processes = processes
        self._reported = 0, 0
        self._kept = -1
        """How many graphs that were compiled in this process the file includes; -1 while there is no file."""

    def load(self, folders: Sequence[Path]) -> bool:
        """Load this process's part from the first folder that has the file; return whether torch could use it."""
        path = next((folder / self.name for folder in folders if (folder / self.name).is_file()), None)
        if path is None:
            return False
        try:
            with zipfile.ZipFile(path) as file:
                part = zlib.decompress(file.read(str(self._processes.local_rank)))
            loaded = torch.compiler.load_cache_artifacts(part) is not None
        except Exception:  # noqa: BLE001  an unusable cache costs only time
            return False
        self._kept = 0 if loaded else -1
        return loaded

    def report(self, reporter: Reporter, step: int) -> None:
        """Report how many graphs this process has found in the cache and compiled, if the numbers have changed."""
        now = _graphs()
        if now != self._reported:
            self._reported = now
            reporter.compile(step, *now)

    def renewed(self, device: torch.device) -> tuple[str, bytes] | None:
        """Return the name and content of a new file if any process compiled a graph that the old file lacks, else None.

        All processes take part; all except the first get None.
        """
        made = _graphs()[1]
        if not self._processes.any(made > self._kept, device):
            return None
        self._kept = made
        is_on_first_machine = self._processes.rank < self._processes.local_count
        parts = self._processes.to_first(_part() if is_on_first_machine else None)
        if not any(parts):
            return None
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as file:
            for local_rank, part in enumerate(parts):
                if part is not None:
                    file.writestr(str(local_rank), part)
        return self.name, content.getvalue()


def _graphs() -> tuple[int, int]:
    """Return how many graphs this process found in torch's cache and how many it compiled; zeros if unknown."""
    try:
        from torch._dynamo.utils import counters
    except ImportError:  # not a public interface: another torch may have it elsewhere
        return 0, 0
    counts = counters["inductor"]
    return counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]


def _part() -> bytes | None:
    """Return the graphs that this process has found or compiled, as bytes for the file; None if there are none."""
    try:
        made = torch.compiler.save_cache_artifacts()
    except Exception:  # noqa: BLE001  a missing cache costs time, but no checkpoint
        traceback.print_exc()
        return None
    return None if made is None else zlib.compress(made[0])
