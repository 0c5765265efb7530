"""Reads new records, events and log lines from a run's folder, each exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from gpurun.core.clock import SystemClock
from gpurun.core.gpu_reading import GpuReading, read_gpus
from gpurun.core.journal_records import Record
from gpurun.core.paths import RunFolder, open_regular
from gpurun.core.trainer_events import TrainerEvent, parse_event
from gpurun.core.transfer_progress import Moving, read_moving
from gpurun.ledger.journal import read_journal
from gpurun.lifecycle.artifacts.log_copy import resume_offset

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class News:
    """Everything new since the last call. `heard_wall` is when this computer last stored output of the machine."""

    records: list[Record]
    events: list[TrainerEvent]
    log_lines: list[bytes]
    moving: Moving | None = None
    heard_wall: float | None = None
    gpus: GpuReading | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is new."""
        return not (self.records or self.events or self.log_lines)


class RunReader:
    """Reads a run's folder from the beginning, in several calls. An incomplete line is left for a later call."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._records_seen = 0
        self._offsets = {folder.events: 0, folder.log: 0}

    def read(self) -> News:
        """Return everything new, at most a megabyte of each file."""
        records = read_journal(self._folder.journal).records[self._records_seen :]
        self._records_seen += len(records)
        events = [
            event for line in self._read_new_lines(self._folder.events) if (event := parse_event(line)) is not None
        ]
        log_lines = self._read_new_lines(self._folder.log)
        heard_wall = max((path.stat().st_mtime for path in self._offsets if path.exists()), default=None)
        now = SystemClock().wall()
        moving, gpus = read_moving(self._folder, now), read_gpus(self._folder, now)
        return News(list(records), events, log_lines, moving, heard_wall, gpus)

    def _read_new_lines(self, path: Path) -> list[bytes]:
        try:
            self._offsets[path] = resume_offset(path, self._offsets[path])
            with open_regular(path) as content:
                content.seek(self._offsets[path])
                block = content.read(_MOST_BYTES)
        except FileNotFoundError:
            return []
        whole = block if len(block) == _MOST_BYTES and b"\n" not in block else block[: block.rfind(b"\n") + 1]
        self._offsets[path] += len(whole)
        return lines_in(whole)


def lines_in(block: bytes) -> list[bytes]:
    """Return the lines of a block. It is split only at line feeds, because progress bars contain carriage returns."""
    return [line.rstrip(b"\r\n") for line in BytesIO(block)]
