"""Steps and losses in what a command prints: the forms that the field's scripts have, and nothing that is guessed.

`iter 10: loss 2.31, time 12ms` (nanoGPT), `step 10/100 | loss 2.31 | lr 3e-4 | 40000 tok/s` (llm.c, nanochat),
`{'loss': 2.31, 'epoch': 0.1}` (the Hugging Face Trainer, whose step stands in its progress bar), JSON lines.
"""

from __future__ import annotations

import ast
import json
import math
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_CHARS = 4000
NUMBER = r"([+-]?(?:\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+|nan|inf))"
STEP = re.compile(r"(?i)\b(?:global[_ ]step|step|iter|iteration|it)\b\s*[:=#]?\s*(\d{1,12})(?:\s*/\s*(\d{1,12}))?")
LOSS = re.compile(r"(?i)\b(?:(val|validation|valid|eval|test|train|training)[ _/-]?)?loss\b\s*[:=]?\s*" + NUMBER)
RATE = re.compile(r"(?i)\b(?:lr|learning[_ ]rate)\b\s*[:=]?\s*" + NUMBER)
SPEED = re.compile(r"(?i)(?:\b([\d,.]+)\s*(k)?\s*tok(?:en)?s?\s*/\s*s|\btok(?:en)?s?/s(?:ec)?\b\s*[:=]\s*([\d,.]+))")
BAR = re.compile(r"\|\s*(\d{1,12})/(\d{1,12})\s*\[")
HELD_OUT = ("val", "validation", "valid", "eval", "test")
STEPS = ("step", "iter", "iteration", "global_step", "steps", "_step")


class Progress:
    """Hears the lines of one command, one after the other."""

    def __init__(self) -> None:
        self.step = 0
        self.total = 0
        self.is_bar = False

    def take(self, line: str) -> dict[str, Any] | None:
        """What a line says: `step` and any of loss, val_loss, lr, tokens_per_s; None where it says no loss."""
        line = line[:MOST_CHARS].strip()
        bar = BAR.search(line)
        if bar:
            self.is_bar, self.step, self.total = True, int(bar[1]), int(bar[2])
        told = self._of_record(line) if line.startswith("{") and line.endswith("}") else self._of_text(line)
        if not told:
            return None
        if "step" in told:
            self.step = told["step"]
        elif not self.is_bar and "val_loss" not in told:
            return None  # A loss without a step is no point of a curve.
        return dict(told, step=self.step)

    def _of_record(self, line: str) -> dict[str, Any]:
        """What a line of JSON says, or a dict as Python prints it."""
        try:
            record = json.loads(line)
        except ValueError:
            try:
                record = ast.literal_eval(line)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return {}
        if not isinstance(record, dict) or "train_runtime" in record:  # The Trainer's last word, of means.
            return {}
        told: dict[str, Any] = {}
        for ours, theirs in (
            ("loss", ("loss", "train_loss", "train/loss")),
            ("val_loss", ("val_loss", "eval_loss", "valid_loss", "validation_loss", "val/loss", "eval/loss")),
            ("lr", ("lr", "learning_rate")),
            ("tokens_per_s", ("tokens_per_s", "tokens_per_second", "tok_per_s", "tokens/s")),
        ):
            values = [number(record[name]) for name in theirs if name in record]
            if values and values[0] is not None:
                told[ours] = values[0]
        steps = [number(record[name]) for name in STEPS if name in record]
        if steps and steps[0] is not None and math.isfinite(steps[0]):
            told["step"] = int(steps[0])
        return told if "loss" in told or "val_loss" in told else {}

    def _of_text(self, line: str) -> dict[str, Any]:
        """What a line of text says."""
        told: dict[str, Any] = {}
        for kind, value in LOSS.findall(line):
            name = "val_loss" if kind.lower() in HELD_OUT else "loss"
            figure = number(value)
            if figure is not None:
                told.setdefault(name, figure)
        if not told:
            return {}
        step = STEP.search(line)
        if step:
            told["step"] = int(step[1])
            self.total = int(step[2]) if step[2] else self.total
        rate, speed = RATE.search(line), SPEED.search(line)
        if rate and number(rate[1]) is not None:
            told["lr"] = number(rate[1])
        if speed:
            figure = number(speed[1] or speed[3])
            if figure is not None:
                told["tokens_per_s"] = figure * (1000.0 if speed[2] else 1.0)
        return told


def number(value: Any) -> float | None:
    """A figure of a record or a text; None for what is none."""
    if isinstance(value, bool):
        return None
    try:
        return float(value.replace(",", "")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
