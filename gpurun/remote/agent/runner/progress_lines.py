"""Reads steps and losses from a command's output, in the formats of well-known scripts, without guessing.

`iter 10: loss 2.31, time 12ms` (nanoGPT), `step 10/100 | loss 2.31 | lr 3e-4 | 40000 tok/s` (llm.c, nanochat),
`{'loss': 2.31, 'epoch': 0.1}` (the Hugging Face Trainer, whose step is in its progress bar), JSON lines, `Epoch: [0][
10/100] ... Loss 6.9 (7.0)` and `Train Epoch: 1 [640/60000 (1%)] Loss: 2.29` (PyTorch's examples), `Epoch 2/3` and
`100/938 ━━━━ 1s 3ms/step - loss: 0.3 - val_loss: 0.2` (Keras), Lightning's bars.

Counters that restart with each epoch are added up to one step. A loss on a test set is neither training nor validation.
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
MOST_BARS = 64
NUMBER = r"([+-]?(?:\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+|nan|inf))"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x08")
LOSS = re.compile(r"(?i)(?:(?<![^\W_])|(?<=[a-z]_))loss(?:_step)?\b\s*[:=]?\s*" + NUMBER)
OTHER_LOSS = re.compile(r"(?i)[a-z0-9]+_$")
SCORES = {
    "core": re.compile(r"(?i)\bcore metric\s*:\s*" + NUMBER),
    "bits_per_byte": re.compile(r"(?i)(?<!minimum )\bval(?:idation)? bpb\s*:\s*" + NUMBER),
}
"""Scores of a checkpoint, in nanochat's format: CORE, and the validation loss in bits per byte."""
RATE = re.compile(r"(?i)\b(?:lr|learning[_ ]rate)\b\s*[:=]?\s*" + NUMBER)
SPEED = re.compile(r"(?i)(?:\b([\d,.]+)\s*(k)?\s*tok(?:en)?s?\s*/\s*s|\btok(?:en)?s?/s(?:ec)?\b\s*[:=]\s*([\d,.]+))")
TEST = re.compile(r"(?i)(?<![a-z])(?:test(?:ing)?|predict(?:ing|ion)?|sanity)(?![a-z])")
HELD_OUT = re.compile(r"(?i)(?<![a-z])(?:val(?:id(?:ation|ating)?)?|eval(?:uation|uating)?|dev|held[- ]?out)(?![a-z])")
TRAINED = re.compile(r"(?i)(?<![a-z])train(?:ing)?(?![a-z])")
EPOCH = re.compile(r"(?i)\bepoch\b\W{0,3}(\d{1,6})(?![\d.]*\.\d)(?:\s*/\s*(\d{1,6}))?")
STEP = re.compile(
    r"(?i)\b(?:global[_ ]step|step|iter|iteration|it|batch|mini-?batch)\b\s*[:=#]?\s*\[?\s*(\d{1,12})(?![\d.]*\.\d)"
    r"(?:\s*/\s*(\d{1,12}))?"
)
BAR = re.compile(r"\|\s*(\d{1,12})/(\d{1,12})\s*\[")
# Counters within an epoch: the bars of Keras and Lightning, `[ 10/100]`, `[640/60000 (1%)]`, `[1,  2000]`.
KERAS = re.compile(r"^\s*(\d{1,12})/(\d{1,12}|Unknown)\s+(?:[━╸╺]|\[[=>.]|-\s|\d+s\b)")
RICH = re.compile(r"[━╸╺]\s+(\d{1,12})/(\d{1,12})\s")
BRACKET = re.compile(r"\[\s*(\d{1,12})\s*/\s*(\d{1,12})\s*(?:\(\s*[\d.]+\s*%\))?\s*\]")
TUPLE = re.compile(r"^\[\s*(\d{1,6}),\s*(\d{1,12})\]\s")
STEPS = ("step", "iter", "iteration", "global_step", "steps", "_step")


class Counter:
    """Adds up a counter that may restart with each epoch. `size` is its maximum, 0 if unknown."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.base = self.last = 0
        self.is_repeated = False

    @property
    def step(self) -> int:
        """Return the total number of steps."""
        return self.base + self.last

    def take(self, count: int, *, is_again: bool) -> int:
        """Return the total steps for a count within an epoch. `is_again` means that the counter has restarted."""
        if is_again:
            self.base += self.last
            self.is_repeated = True
        self.last = count
        return self.step


class Progress:
    """Reads the lines of one command in order. `total` is the number of steps that the user stated, else 0."""

    def __init__(self, total: int = 0) -> None:
        self.step: int | None = None
        self.total = total
        self.is_total_given = bool(total)
        self.epoch, self.epochs = 0, 0
        self.first_epoch: int | None = None
        self.counts_epochs = True  # True until something finer than epochs is counted.
        self.bars: dict[int, Counter] = {}  # Keyed by size; the bar that was drawn last is at the end.
        self.used: Counter | None = None  # The training bar, which is the bar beside which losses were printed.
        self.text, self.text_epoch = Counter(), -1  # -1: no step has been counted in any epoch yet.
        self.keras_size, self.keras_last = 0, 0
        self.last_val: float | None = None

    def take(self, line: str) -> dict[str, Any] | None:
        """Return the figures in a line: `step` and any of loss, val_loss, lr, tokens_per_s; None if it has no loss.

        A line with a score (`SCORES`) has only the score and a step. The step of a validation loss is None if it cannot
        be determined.
        """
        line = line[:MOST_CHARS]
        if "core metric" in line.lower() or " bpb" in line.lower():
            return self._parse_score(line)
        if "|" not in line and not any(word in line.lower() for word in ("loss", "epoch")):
            return None  # A flood of lines is skipped quickly.
        line = ESCAPES.sub("", line).strip()
        if line.startswith("{") and line.endswith("}"):
            return self._add_step(self._parse_record(line), epoch=None)
        about = re.split(r"\d", line, maxsplit=1)[0]
        is_aside = bool(TEST.search(about) or HELD_OUT.search(about)) and not TRAINED.search(about)
        if is_aside and any(form.search(line) for form in (BAR, BRACKET, RICH)):
            return None  # This is an unfinished pass over data other than the training data.
        epoch, rest = self._hear_epoch(line)
        found = losses_of(line, about)
        bar = BAR.search(line)
        if bar and not found:
            self._find_step_of_bar(int(bar[1]), int(bar[2]))
        if not found:
            return None
        if (bar or RICH.search(line)) and found.get("val_loss") == self.last_val:
            found.pop("val_loss", None)  # A bar repeats the last value until there is a new value.
        self.last_val = found.get("val_loss", self.last_val)
        if is_aside:
            at = STEP.search(line)
            found.update({"step": int(at[1])} if at and not at[2] else {})
        else:
            step = self._parse_counted_step(line, rest)
            if step is not None and step < 0:
                return None
            found.update({} if step is None else {"step": step})
        return self._add_step(dict(found, **speeds_of(line)), epoch=epoch)

    def _parse_score(self, line: str) -> dict[str, Any] | None:
        """Return a score with the step in the line, or else with the last step; None if the line has no score."""
        found = {name: form.search(line) for name, form in SCORES.items()}
        figures = {name: read_figure(match[1]) for name, match in found.items() if match}
        at = STEP.search(line)
        return dict(figures, step=int(at[1]) if at else self.step) if figures else None

    def _add_step(self, figures: dict[str, Any], *, epoch: int | None) -> dict[str, Any] | None:
        """Add the step to the figures: their own, else the epoch if nothing finer is counted, else the bar's.

        Return None for figures without a loss, and for a training loss without a step.
        """
        epoch = figures.pop("epoch", epoch)
        if "loss" not in figures and "val_loss" not in figures:
            return None
        step = figures.get("step")
        if step is not None:
            self.counts_epochs = False
        elif epoch is not None and self.counts_epochs and self.used is None:
            step = epoch
            self.set_total(self.epochs)
        else:
            step = self._find_step_of_loss(is_trained="loss" in figures)
        if step is None and "val_loss" not in figures:
            return None  # A loss without a step is not a point of a curve.
        self.step = self.step if step is None else step
        return dict(figures, step=self.step)

    def _find_step_of_loss(self, *, is_trained: bool) -> int | None:
        """Return the step of the bar to which a loss without a step belongs; None if there is none.

        The Hugging Face Trainer draws a second bar while it evaluates. That bar is full when the loss is printed.
        """
        unfinished = [bar for bar in self.bars.values() if bar.last < bar.size]
        bar = self.used
        if bar is None or (is_trained and unfinished and bar not in unfinished):
            bar = unfinished[-1] if unfinished else bar
        if bar is None and is_trained and self.bars:
            bar = list(self.bars.values())[-1]
        if bar is None:
            return None
        if is_trained:
            self._note_training_bar(bar)
        return bar.step

    def _note_training_bar(self, bar: Counter) -> None:
        """Note that a bar is the training bar. Its maximum is the total, unless each epoch has its own bar."""
        self.used, self.counts_epochs = bar, False
        is_one_of_many = bar.is_repeated or self.first_epoch is not None
        self.set_total(bar.size * self.epochs if self.epochs else 0 if is_one_of_many else bar.size)

    def _hear_epoch(self, line: str) -> tuple[int | None, str]:
        """Note the epoch in a line, and the number of epochs. Return the epoch, and the line without it.

        The number of epochs is noted only if epochs count from one.
        """
        found = EPOCH.search(line)
        if not found:
            return None, line
        self.epoch = int(found[1])
        self.first_epoch = self.epoch if self.first_epoch is None else self.first_epoch
        self.epochs = int(found[2] or 0) if self.first_epoch else 0
        self.keras_size = self.keras_last = 0
        return self.epoch, line[: found.start()] + " " + line[found.end() :]

    def _parse_counted_step(self, line: str, rest: str) -> int | None:
        """Return the step in a line, over all epochs; None if it has none, -1 if it belongs to an evaluation.

        `rest` is the line without its epoch.
        """
        bar, keras, rich = BAR.search(line), KERAS.search(line), RICH.search(rest)
        if bar:
            return self._find_step_of_bar(int(bar[1]), int(bar[2]), has_loss=True)
        if keras:
            return self._find_step_of_keras(int(keras[1]), int(keras[2]) if keras[2].isdigit() else 0)
        if rich:
            return self._find_step_in_epoch(int(rich[1]), int(rich[2]))
        step, bracket, pair = STEP.search(rest), BRACKET.search(rest), TUPLE.search(line)
        if step:
            return self._find_step_of_text(int(step[1]), int(step[2] or 0))
        if bracket:
            return self._find_step_in_epoch(int(bracket[1]), int(bracket[2]), is_from_zero="][" in rest)
        if pair:
            self.epoch = int(pair[1])
            return self._find_step_of_text(int(pair[2]), 0)
        return None

    def _find_step_of_bar(self, count: int, size: int, *, has_loss: bool = False) -> int | None:
        """Return the step of a bar; None if there are too many bars. A bar without a loss only shows progress."""
        if size not in self.bars and len(self.bars) >= MOST_BARS:
            return None
        bar = self.bars.pop(size, None) or Counter(size)
        self.bars[size] = bar
        step = bar.take(count, is_again=count < bar.last)
        if has_loss:
            self._note_training_bar(bar)
        elif bar is self.used:
            self.step = step
        return step

    def _find_step_of_keras(self, count: int, size: int) -> int:
        """Return the step of a Keras bar; -1 for a bar of `evaluate` (another size, or not in a new epoch)."""
        if count < self.keras_last or self.keras_size not in (0, size):
            return -1
        self.keras_size, self.keras_last = size, count
        return self._find_step_in_epoch(count, size)

    def _find_step_in_epoch(self, count: int, size: int, *, is_from_zero: bool = False) -> int:
        """Return the step of a count within the latest epoch."""
        if not size:
            return count
        before = self.epoch - (0 if is_from_zero or self.first_epoch == 0 or self.first_epoch is None else 1)
        self.set_total(size * self.epochs)
        return max(0, before) * size + count

    def _find_step_of_text(self, count: int, size: int) -> int:
        """Return the step of text such as `step 10/100`. It counts within an epoch if it restarts with a new epoch."""
        is_again = self.text_epoch not in (-1, self.epoch) and count <= self.text.last
        self.text_epoch = self.epoch
        if is_again:
            self.text.last = max(self.text.last, size)  # The previous epoch was completed.
        step = self.text.take(count, is_again=is_again)
        if self.text.is_repeated:
            self.set_total(size * self.epochs)
        elif self.first_epoch is None or self.epoch != self.first_epoch:
            self.set_total(size or self.total)
        return step

    def set_total(self, total: int) -> None:
        """Note the total number of steps, unless the user stated it."""
        self.total = self.total if self.is_total_given else total

    def _parse_record(self, line: str) -> dict[str, Any]:
        """Return the figures in a line of JSON, or in a printed Python dict."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            try:
                record = ast.literal_eval(line)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return {}
        # "train_runtime" marks the Trainer's final summary, which has means.
        if not isinstance(record, dict) or "train_runtime" in record:
            return {}
        figures: dict[str, Any] = {}
        for ours, theirs in (
            ("loss", ("loss", "train_loss", "train/loss")),
            ("val_loss", ("val_loss", "eval_loss", "valid_loss", "validation_loss", "val/loss", "eval/loss")),
            ("lr", ("lr", "learning_rate")),
            ("tokens_per_s", ("tokens_per_s", "tokens_per_second", "tok_per_s", "tokens/s")),
        ):
            values = [read_figure(record[name]) for name in theirs if name in record]
            if values and values[0] is not None:
                figures[ours] = values[0]
        steps = [read_figure(record[name]) for name in STEPS if name in record]
        if steps and steps[0] is not None and math.isfinite(steps[0]):
            figures["step"] = int(steps[0])
        elif isinstance(record.get("epoch"), int) and not self.bars:
            figures["epoch"] = record["epoch"]
        return figures


def losses_of(line: str, about: str) -> dict[str, Any]:
    """Return the training and the validation loss in a line of text.

    The nearest words before a loss, back to the previous figure, show which loss it is; without such a word, `about`
    does.
    """
    losses: dict[str, Any] = {}
    for found in LOSS.finditer(line):
        before = re.split(r"[\d|,;]", line[: found.start()])[-1]
        figure = read_figure(found[1])
        named = [form for form in (TEST, HELD_OUT, TRAINED) if form.search(before)]
        named = named or [form for form in (TEST, HELD_OUT) if form.search(about)]
        # If a loss has several parts, none of them is the loss itself.
        is_other = OTHER_LOSS.search(before) and not named
        if figure is not None and TEST not in named and not is_other:
            losses.setdefault("val_loss" if HELD_OUT in named else "loss", figure)
    return losses


def speeds_of(line: str) -> dict[str, float]:
    """Return the learning rate and the tokens per second in a line of text."""
    speeds: dict[str, float] = {}
    rate, speed = RATE.search(line), SPEED.search(line)
    lr, figure = read_figure(rate[1]) if rate else None, read_figure(speed[1] or speed[3]) if speed else None
    if lr is not None:
        speeds["lr"] = lr
    if speed and figure is not None:
        speeds["tokens_per_s"] = figure * (1000.0 if speed[2] else 1.0)
    return speeds


def read_figure(value: Any) -> float | None:
    """Return a figure from a record or a text as a number; None if it is not a number."""
    if isinstance(value, bool):
        return None
    try:
        return float(value.replace(",", "")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
