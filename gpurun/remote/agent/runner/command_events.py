"""Reads `$GPURUN_EVENTS`, a file to which a script may append one JSON line per step. Its log is then not parsed.

    {"step": 10, "loss": 2.31, "val_loss": 2.4, "lr": 3e-4, "tokens_per_s": 98520, "total_steps": 100}

`step` is required, the other keys are optional, and unknown keys are ignored.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "command_events.jsonl"
FIGURES = ("loss", "val_loss", "lr", "tokens_per_s")
MOST_LINE_BYTES = 4096
MOST_BYTES = 1 << 18
"""How many bytes of the file are read per check. What a faster writer adds is read later."""
MOST_STEPS = 1 << 53


class CommandEvents:
    """Reads the lines that are added to the file."""

    def __init__(self, path: str) -> None:
        self.path, self.place, self.rest = path, 0, b""
        self.malformed = ""
        """The first malformed line."""
        with suppress(OSError):  # Without the file, the log is parsed.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))

    def read(self) -> list[dict[str, Any]]:
        """Return the figures of each new line. Invalid lines are skipped."""
        try:
            with open(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                if os.fstat(file.fileno()).st_size < self.place:  # The file was truncated.
                    self.place, self.rest = 0, b""
                file.seek(self.place)
                piece = file.read(MOST_BYTES)
        except OSError:
            return []
        self.place += len(piece)
        lines = (self.rest + piece).split(b"\n")
        self.rest = lines.pop()[: MOST_LINE_BYTES + 1]
        found = []
        for line in lines:
            event = parse_command_event(line) if len(line) <= MOST_LINE_BYTES else None
            if event is not None:
                found.append(event)
            elif line.strip() and not self.malformed:
                self.malformed = line[:80].decode("utf-8", "replace")
        return found


def parse_command_event(line: bytes) -> dict[str, Any] | None:
    """Return the figures of a line; None if it is not an object with a step, or a figure is not a number."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    counts = {name: event[name] for name in ("step", "total_steps") if event.get(name) is not None}
    figures = {name: event[name] for name in FIGURES if event.get(name) is not None}
    if "step" not in counts or not all(type(key) in (int, float) for key in (*counts.values(), *figures.values())):
        return None
    if not all(0 <= key < MOST_STEPS and key == int(key) for key in counts.values()):
        return None
    return dict({name: float(key) for name, key in figures.items()}, **{name: int(key) for name, key in counts.items()})
