"""Reads `$GPURUN_EVENTS`: a file to which a script may append a JSON line a step, so that nothing is read from its log.

    {"step": 10, "loss": 2.31, "val_loss": 2.4, "lr": 3e-4, "tokens_per_s": 98520, "total_steps": 100}

`step` is needed, all else may be missing; other keys are passed over.
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
"""So much of the file is read at a look: who writes faster is read later."""
MOST_STEPS = 1 << 53


class ToldEvents:
    """What the file has that was not read yet."""

    def __init__(self, path: str) -> None:
        self.path, self.place, self.rest = path, 0, b""
        self.malformed = ""
        """The first line that is not as it should be."""
        with suppress(OSError):  # Without it the log tells what it can.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))

    def read(self) -> list[dict[str, Any]]:
        """Return what each new line says; one that says nothing sane is passed over."""
        try:
            with open(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                if os.fstat(file.fileno()).st_size < self.place:  # It was begun again.
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
            told = parse_told_event(line) if len(line) <= MOST_LINE_BYTES else None
            if told is not None:
                found.append(told)
            elif line.strip() and not self.malformed:
                self.malformed = line[:80].decode("utf-8", "replace")
        return found


def parse_told_event(line: bytes) -> dict[str, Any] | None:
    """Return the figures of a line; None where it is not an object with a step, or a figure is not a number."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    counts = {name: told[name] for name in ("step", "total_steps") if told.get(name) is not None}
    figures = {name: told[name] for name in FIGURES if told.get(name) is not None}
    if "step" not in counts or not all(type(one) in (int, float) for one in (*counts.values(), *figures.values())):
        return None
    if not all(0 <= one < MOST_STEPS and one == int(one) for one in counts.values()):
        return None
    return dict({name: float(one) for name, one in figures.items()}, **{name: int(one) for name, one in counts.items()})
