"""One pass over a trainer's events: the curve, the validation losses and the samples, however long or false they are.

The events are the instance's word. A figure that is not finite is left out, a line that cannot be read is counted, and
whatever the length of the file, a bounded number of points and samples is kept: evenly thinned, the last one always.
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
    """A loss and where it was taken: in steps, tokens seen, seconds of training, and dollars spent on the rental.

    A validation loss may have more figures beside it: bits a byte of text, the share of HellaSwag's items solved.
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
    """What the model wrote after a prompt, made harmless; `lines` do not repeat the prompt."""

    step: int
    lines: tuple[str, ...]


class Kept(Generic[T]):
    """At most `most` of what comes, in order: thinned evenly when there is more, and always the newest one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: list[tuple[int, T]] = []
        self._stride, self.seen = 1, 0

    def add(self, item: T) -> None:
        """Take one more; what came last only stays if its turn has come."""
        if self._items and self._items[-1][0] % self._stride:
            self._items.pop()
        self._items.append((self.seen, item))
        self.seen += 1
        if len(self._items) > self._most:
            self._stride *= 2
            last = self._items[-1]
            self._items = [one for one in self._items[:-1] if one[0] % self._stride == 0] + [last]

    def forget(self, unwanted: Callable[[T], bool]) -> None:
        """Drop what turned out not to count."""
        self._items = [one for one in self._items if not unwanted(one[1])]

    @property
    def items(self) -> list[T]:
        """What is left, in order."""
        return [item for _, item in self._items]


@dataclass
class Told:
    """What a run's events tell; `unreadable` counts the lines that were none."""

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
    """The last ones that were told."""
    best: Mark | None = None
    """The lowest validation loss of all, also of those that are not kept."""

    def tokens_at(self, step: int) -> int | None:
        """Tokens seen after a step, where the trainer said how many one step takes."""
        return step * self.tokens_per_step if self.tokens_per_step else None


def hear(lines: Iterable[bytes | str], spent_at: Callable[[float], Micros | None] = lambda _: None) -> Told:
    """Listen to a run from its beginning; `spent_at` gives the dollars spent after so many seconds of training.

    A trainer that went on from a checkpoint did the steps after it again: what it said of them before is forgotten.
    """
    told, before_s, torn = Told(), 0.0, False
    for line in lines:
        event = parse_event(line)
        torn = event is None
        if event is None:
            told.unreadable += 1
            continue
        if isinstance(event, StartEvent):
            before_s = told.seconds
            _start(told, event)
        told.seconds = max(told.seconds, before_s + (event.elapsed_s or 0.0))
        match event:
            case StepEvent():
                _mark(told, told.losses, event, event.loss, spent_at)
            case CoreScoreEvent():
                told.core = event.core
            case EvaluationEvent():
                told.bits_per_byte = event.bits_per_byte if event.bits_per_byte is not None else told.bits_per_byte
                mark = _mark(told, told.validation, event, event.val_loss, spent_at)
                if mark is not None and (told.best is None or mark.loss < told.best.loss):
                    told.best = mark
            case SampleEvent():
                _sample(told, event)
            case AlertEvent() if len(told.warnings) < _MOST_WARNINGS:
                told.warnings.append(safe_line(event.message.replace("\n", " ")))
            case StopEvent():
                told.stop_reason, told.stop_message = event.reason, safe_line(event.message.replace("\n", " "))
    if torn:
        told.unreadable -= 1  # The last line of a run that goes on, or was cut off, may be half a line.
    return told


def _start(told: Told, event: StartEvent) -> None:
    told.device = event.cuda_name or event.device or ""
    told.steps = event.steps
    told.tokens_per_step, told.train_tokens = event.tokens_per_step, event.train_tokens
    came_to = event.resumed_from or 0
    for marks in (told.losses, told.validation):
        marks.forget(lambda mark: mark.step > came_to)
    if told.best is not None and told.best.step > came_to:
        told.best = min(told.validation.items, key=lambda mark: mark.loss, default=None)
    for samples in told.samples.values():
        samples.forget(lambda sample: sample.step > came_to)


def _mark(
    told: Told,
    kept: Kept[Mark],
    event: StepEvent | EvaluationEvent,
    loss: float | None,
    spent_at: Callable[[float], Micros | None],
) -> Mark | None:
    """Keep a loss, where it is one."""
    if event.step is None or loss is None:
        told.not_finite += loss is None and ("loss" in event.said or "val_loss" in event.said)
        return None
    tokens = told.tokens_at(event.step) if event.tokens is None else event.tokens
    beside = (event.bits_per_byte, event.hellaswag) if isinstance(event, EvaluationEvent) else ()
    mark = Mark(event.step, loss, tokens, told.seconds, spent_at(told.seconds), *beside)
    kept.add(mark)
    return mark


def _sample(told: Told, event: SampleEvent) -> None:
    prompt = safe_line(event.prompt.replace("\n", " "))
    if event.step is None or event.text is None:
        return
    if prompt not in told.samples and len(told.samples) == MOST_PROMPTS:
        told.prompts_left_out.add(prompt[:80])
        return
    lines = tuple(safe_text(event.text.removeprefix(event.prompt), most_lines=_MOST_LINES))
    told.samples.setdefault(prompt, Kept(MOST_SAMPLES)).add(WrittenSample(event.step, lines))
