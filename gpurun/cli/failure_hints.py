"""Suggests how to fix a failed job, from the agent's observations and the end of the log."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from gpurun.core.journal_events import TrainObserved
from gpurun.core.journal_records import last_typed
from gpurun.core.paths import RunFolder, open_regular
from gpurun.core.untrusted import whole
from gpurun.ledger.runs import Sight
from gpurun.view.number_format import format_bytes

_TAIL_BYTES = 32 << 10
_SHARED_MEMORY = re.compile(r"out of shared memory|/dev/shm|shared memory object|killed by signal: Bus error", re.I)


def failure_hint(sight: Sight, on: str = "") -> str:
    """Return a hint for a failed job: how to fix each recognised cause; then `on`, else where its log and files are."""
    folder, name = sight.folder, sight.folder.name
    saved = f" Files that were saved before are in {folder.artifacts}." if _has_files(folder) else ""
    return " ".join((*filter(None, _find_cures(sight)), on or f"To read its output: gpurun logs {name}.{saved}"))


def _find_cures(sight: Sight) -> Iterator[str]:
    """Yield how to fix each recognised cause. The log is untrusted, so it affects only hints."""
    ended, words = last_typed(sight.records, TrainObserved), _log_tail(sight.folder)
    assert ended is not None, "a failed job has a record of its end"
    yield from sight.plan.job.cures(ended.message, words)
    if ended.reason == "idle":
        yield "If the job may be idle for this long: --idle 4h, or --idle off."
    if ended.reason == "silent":
        yield "If the job may be silent for this long: --silent 2h, or leave --silent out."
    if whole(ended.oom_kills):
        yield "Rent a machine with more memory, or use fewer DataLoader workers and smaller batches."
    elif _SHARED_MEMORY.search(words):
        size = whole(ended.shm_bytes)
        had = f", which has {format_bytes(size)} there" if size else ""
        yield (
            f"A DataLoader's workers pass their batches through /dev/shm{had}: use fewer workers or none, "
            "torch.multiprocessing.set_sharing_strategy('file_system'), or an --image or box with a larger one."
        )


def _log_tail(folder: RunFolder) -> str:
    try:
        with open_regular(folder.log) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _has_files(folder: RunFolder) -> bool:
    return any(path.is_file() for path in folder.artifacts.rglob("*"))
