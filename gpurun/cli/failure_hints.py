"""What to do about a training or a command that failed, by what the machine's agent saw and by its last words."""

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
    """Return what to do about a failed job: the cure of what was recognised, then `on`, or its log and its files."""
    folder, name = sight.folder, sight.folder.name
    saved = f" What was saved before is in {folder.artifacts}." if _has_files(folder) else ""
    return " ".join((*filter(None, _cures(sight)), on or f"All that it printed: gpurun logs {name}.{saved}"))


def _cures(sight: Sight) -> Iterator[str]:
    """Yield what would help, for each cause that shows; the log is a claim, and read for its hint alone."""
    ended, words = last_typed(sight.records, TrainObserved), _log_tail(sight.folder)
    assert ended is not None, "only what ended can have failed"
    yield from sight.plan.job.cures(ended.message, words)
    if ended.reason == "idle":
        yield "A job that is meant to wait so long: --idle 4h, or --idle off."
    if ended.reason == "silent":
        yield "A job that is meant to be silent so long: --silent 2h, or leave --silent out."
    if whole(ended.oom_kills):
        yield "Take a machine with more memory, or fewer DataLoader workers and smaller pieces of the data at once."
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
