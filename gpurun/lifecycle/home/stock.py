"""What is at home of a run whose machine is gone, where its collect step never came to say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpurun.core.paths import RunFolder
from gpurun.core.progress import Event, Record
from gpurun.ledger.journal import read_journal
from gpurun.lifecycle.context import Note
from gpurun.lifecycle.home.at_home import is_here, remembered
from gpurun.lifecycle.home.worth import newest, wanted
from gpurun.machine.answers import Manifest


def at_home_by(records: Sequence[Record], folder: RunFolder) -> dict[str, Any]:
    """What the collect step had brought; without one, what came home early, each digest checked."""
    collected = (one.data for one in reversed(records) if one.event is Event.COLLECT_OBSERVED)
    return next(collected, None) or _came_early(remembered(folder) or Manifest(), folder)


def _came_early(manifest: Manifest, folder: RunFolder) -> dict[str, Any]:
    here = {file.name: file for file in manifest.files if is_here(folder.artifacts, file)}
    due = wanted(manifest) if all(file.name in here for file in newest(manifest)) else manifest.files
    return {
        "files": [file.model_dump(mode="json") for file in here.values()],
        "missing": [file.name for file in due if file.name not in here],
        "latest": manifest.latest,
        "best": manifest.best.model_dump(mode="json") if manifest.best else None,
    }


def take_stock(folder: RunFolder) -> Iterator[Note]:
    """Record what is at home, if nothing of it is on record.

    So it is after `gpurun collect` and `gpurun destroy`, or a lid that stayed closed until the lease was over.
    """
    records = read_journal(folder.journal).records
    if any(one.event in (Event.COLLECT_OBSERVED, Event.SALVAGE_OBSERVED) for one in records):
        return
    found = at_home_by(records, folder)
    if found["files"]:
        yield Event.SALVAGE_INTENDED, {"folder": ""}
        yield Event.SALVAGE_OBSERVED, {**found, "seconds": 0.0, "brought": 0}
