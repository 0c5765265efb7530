"""Output for programs: the versioned JSON envelope of a verb, and the JSON Lines of a run.

Fields are only ever added, so `v` is 1. The output is ASCII, so that no string from the machine can reach a terminal
unescaped. A figure that is not finite becomes null, because JSON cannot express it; so does anything that is nested too
deeply.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpurun.core.clock import utc

if TYPE_CHECKING:
    from gpurun.core.journal_records import Record
    from gpurun.core.trainer_events import TrainerEvent

ENVELOPE_KEYS = ("v", "command", "ok", "data", "errors", "exit_code")
ERROR_KEYS = ("code", "message", "hint")
_DEEPEST = 64
_OK = (0, 8)  # Exit codes that mean success: done, or left while the run continues.


def envelope_json(command: str, data: Mapping[str, Any], errors: Sequence[Mapping[str, str]], exit_code: int) -> str:
    """Return one line of JSON for one verb. `ok` means that there is no error and the exit code is 0 or 8 (pending)."""
    records = [{key: error[key] for key in ERROR_KEYS} for error in errors]
    values = (1, command, not records and exit_code in _OK, dict(data), records, int(exit_code))
    return _dump(dict(zip(ENVELOPE_KEYS, values, strict=True)))


def record_json(record: Record) -> str:
    """Return a journal record as a line of `train --json`."""
    head = {"v": 1, "stream": "journal", "event": str(record.event), "seq": record.seq, "time": utc(record.wall)}
    return _dump({**head, "data": record.data})


def event_json(event: TrainerEvent) -> str:
    """Return a trainer's event as a line of `train --json`. `data` has the raw content of the event."""
    return _dump({"v": 1, "stream": "trainer", "event": event.kind, "data": event.said})


def log_json(words: bytes) -> str:
    """Return a line of the trainer's log as a line of `logs --json`. Only invalid UTF-8 is replaced."""
    text = words.decode("utf-8", "replace")
    return _dump({"v": 1, "stream": "log", "event": "line", "data": {"text": text}})


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(finite(value), ensure_ascii=True, allow_nan=False, default=str)


def finite(value: Any, depth: int = 0) -> Any:
    """Return the data with null for figures that JSON cannot express, and for anything that is nested too deeply."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (Mapping, list, tuple)) and depth == _DEEPEST:
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, depth + 1) for item in value]
    return value
