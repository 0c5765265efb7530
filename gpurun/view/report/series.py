"""Reads a trainer's events once, and keeps what a report needs: losses, validation losses and samples.

The machine wrote the events, so they are untrusted. A figure that is not finite is left out, and an unreadable line is
counted. Of a long file only a limited number of points and samples is kept, evenly spaced and always with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpurun.core.money import Micros
from gpurun.core.trainer_events import (
    AlertEvent,
    CoreScoreEvent,
    EvaluationEvent,
    SampleEvent,
    StartEvent,
    StepEvent,
    StopEvent,
    parse_event,
)
from gpurun.core.untrusted import safe_line, safe_text

MOST_MARKS = 4096
MOST_PROMPTS = 12
MOST_SAMPLES = 24
_MOST_LINES = 30
_MOST_WARNINGS = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Mark:
    """A loss and where it was measured: in steps, tokens seen, seconds of training, and dollars spent on the rental.

    A validation loss may have further figures: bits per byte of text, and the share of HellaSwag's items that were
    solved.
    """

    step: int
    loss: float
    tokens: int | None = None
    seconds: float | None = None
    spent_micros: Micros | None = None
    bits_per_byte: float | None = None
    hellaswag: float | None = None


@dataclass(frozen=True)
class WrittenSample:
    """A model's text for a prompt, made harmless; `lines` do not repeat the prompt."""

    step: int
    lines: tuple[str, ...]


class Kept(Generic[T]):
    """At most `most` of the added items, in order: all, or an even selection that always has the newest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: list[tuple[int, T]] = []
        self._stride, self.seen = 1, 0

    def add(self, item: T) -> None:
        """Add the newest item. Drop the previous one unless it belongs to the even selection."""
        if self._items and self._items[-1][0] % self._stride:
            self._items.pop()
        self._items.append((self.seen, item))
        self.seen += 1
        if len(self._items) > self._most:
            self._stride *= 2
            last = self._items[-1]
            self._items = [kept for kept in self._items[:-1] if kept[0] % self._stride == 0] + [last]

    def forget(self, unwanted: Callable[[T], bool]) -> None:
        """Drop the items for which `unwanted` returns True."""
        self._items = [kept for kept in self._items if not unwanted(kept[1])]

    @property
    def items(self) -> list[T]:
        """Return the remaining items, in order."""
        return [item for _, item in self._items]


@dataclass
class RunHistory:
    """The content of a run's events. `unreadable` counts invalid lines."""

    losses: Kept[Mark] = field(default_factory=lambda: Kept(MOST_MARKS))
    validation: Kept[Mark] = field(default_factory=lambda: Kept(MOST_MARKS))
    samples: dict[str, Kept[WrittenSample]] = field(default_factory=dict)
    prompts_left_out: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    device: str = ""
    steps: int | None = None
    tokens_per_step: int | None = None
    train_tokens: int | None = None
    seconds: float = 0.0
    stop_reason: str = ""
    stop_message: str = ""
    unreadable: int = 0
    not_finite: int = 0
    core: float | None = None
    bits_per_byte: float | None = None
    """The latest values of `core` and `bits_per_byte`."""
    best: Mark | None = None
    """The lowest of all validation losses, including those that were not kept."""

    def tokens_at(self, step: int) -> int | None:
        """Return the tokens seen after a step, if the trainer reported the tokens per step."""
        return step * self.tokens_per_step if self.tokens_per_step else None


def hear(lines: Iterable[bytes | str], spent_at: Callable[[float], Micros | None] = lambda _: None) -> RunHistory:
    """Read the events of a run. `spent_at` returns the micro-dollars spent after a number of seconds of training.

    A trainer that resumed from a checkpoint repeated the steps after it. Only the later figures of these steps are
    kept.
    """
    content, before_s, torn = RunHistory(), 0.0, False
    for line in lines:
        event = parse_event(line)
        torn = event is None
        if event is None:
            content.unreadable += 1
            continue
        if isinstance(event, StartEvent):
            before_s = content.seconds
            _apply_start(content, event)
        content.seconds = max(content.seconds, before_s + (event.elapsed_s or 0.0))
        match event:
            case StepEvent():
                _add_mark(content, content.losses, event, event.loss, spent_at)
            case CoreScoreEvent():
                content.core = event.core
            case EvaluationEvent():
                content.bits_per_byte = (
                    event.bits_per_byte if event.bits_per_byte is not None else content.bits_per_byte
                )
                mark = _add_mark(content, content.validation, event, event.val_loss, spent_at)
                if mark is not None and (content.best is None or mark.loss < content.best.loss):
                    content.best = mark
            case SampleEvent():
                _add_sample(content, event)
            case AlertEvent() if len(content.warnings) < _MOST_WARNINGS:
                content.warnings.append(safe_line(event.message.replace("\n", " ")))
            case StopEvent():
                content.stop_reason, content.stop_message = event.reason, safe_line(event.message.replace("\n", " "))
    if torn:
        # The last line of an open or aborted run may be incomplete, so it does not count as unreadable.
        content.unreadable -= 1
    return content


def _apply_start(content: RunHistory, event: StartEvent) -> None:
    content.device = event.cuda_name or event.device or ""
    content.steps = event.steps
    content.tokens_per_step, content.train_tokens = event.tokens_per_step, event.train_tokens
    came_to = event.resumed_from or 0
    for marks in (content.losses, content.validation):
        marks.forget(lambda mark: mark.step > came_to)
    if content.best is not None and content.best.step > came_to:
        content.best = min(content.validation.items, key=lambda mark: mark.loss, default=None)
    for samples in content.samples.values():
        samples.forget(lambda sample: sample.step > came_to)


def _add_mark(
    content: RunHistory,
    kept: Kept[Mark],
    event: StepEvent | EvaluationEvent,
    loss: float | None,
    spent_at: Callable[[float], Micros | None],
) -> Mark | None:
    """Add a loss to `kept`, and return it; None if the event has no finite loss."""
    if event.step is None or loss is None:
        content.not_finite += loss is None and ("loss" in event.said or "val_loss" in event.said)
        return None
    tokens = content.tokens_at(event.step) if event.tokens is None else event.tokens
    beside = (event.bits_per_byte, event.hellaswag) if isinstance(event, EvaluationEvent) else ()
    mark = Mark(event.step, loss, tokens, content.seconds, spent_at(content.seconds), *beside)
    kept.add(mark)
    return mark


def _add_sample(content: RunHistory, event: SampleEvent) -> None:
    prompt = safe_line(event.prompt.replace("\n", " "))
    if event.step is None or event.text is None:
        return
    if prompt not in content.samples and len(content.samples) == MOST_PROMPTS:
        content.prompts_left_out.add(prompt[:80])
        return
    lines = tuple(safe_text(event.text.removeprefix(event.prompt), most_lines=_MOST_LINES))
    content.samples.setdefault(prompt, Kept(MOST_SAMPLES)).add(WrittenSample(event.step, lines))
