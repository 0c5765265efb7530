"""What programs read: the versioned JSON envelope of a verb, and the JSON Lines of a run. Additive only; `v` is 1.

Everything is ASCII on the way out, so that no string of the far side can reach a terminal raw, and a figure that is
not finite becomes null, because JSON has no name for it; so does what is nested too deep for anybody to read.
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
_OK = (0, 8)  # Done, and left while the run goes on: the command did what was asked.


def envelope_json(command: str, data: Mapping[str, Any], errors: Sequence[Mapping[str, str]], exit_code: int) -> str:
    """One line of JSON for one verb. `ok` means that there is no error and the exit code is 0 or 8 (pending)."""
    told = [{key: error[key] for key in ERROR_KEYS} for error in errors]
    values = (1, command, not told and exit_code in _OK, dict(data), told, int(exit_code))
    return _dump(dict(zip(ENVELOPE_KEYS, values, strict=True)))


def record_json(record: Record) -> str:
    """A journal record as a line of `train --json`."""
    head = {"v": 1, "stream": "journal", "event": str(record.event), "seq": record.seq, "time": utc(record.wall)}
    return _dump({**head, "data": record.data})


def event_json(event: TrainerEvent) -> str:
    """A trainer's event as a line of `train --json`, its own words under `data`."""
    return _dump({"v": 1, "stream": "trainer", "event": event.kind, "data": event.said})


def log_json(words: bytes) -> str:
    """A line of the trainer's log as a line of `logs --json`, whole, in its own words."""
    text = words.decode("utf-8", "replace")
    return _dump({"v": 1, "stream": "log", "event": "line", "data": {"text": text}})


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(finite(value), ensure_ascii=True, allow_nan=False, default=str)


def finite(value: Any, depth: int = 0) -> Any:
    """The same data with null for every figure that JSON cannot carry, and for brackets that would exhaust a reader."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (Mapping, list, tuple)) and depth == _DEEPEST:
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, depth + 1) for item in value]
    return value
