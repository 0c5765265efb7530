"""Parses the trainer's events, the lines of events.jsonl. No other module parses them (docs/FORMATS.md has every key).

Everything in them comes from the machine and may be false. Every field is checked here: a figure is a finite number or
None, a word is one harmless line, a text has no control characters except line ends and tabs, and all lengths are
bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpurun.core.untrusted import LINE_BYTES, Malformed, lines_of, number, parse_object, plain_line, whole

_LONGEST_S = 1e12
_LATEST_WALL = 32_503_680_000.0  # The year 3000, which calendars can format.
_MOST_CHARS = 16 << 10
_MOST_NAMED, _NAME_CHARS = 20, 400
# Characters that a terminal obeys: C0 except tab and line ends, DEL, C1, changes of text direction, surrogate halves.
_COMMANDS = re.compile("[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class TrainerEvent:
    """The fields of every event; an event of an unknown kind has only these.

    `wall` is in seconds since the epoch, `elapsed_s` in seconds since the trainer's process started. `said` is the
    line's JSON object, for readers that pass it on unchecked.
    """

    kind: str
    said: Mapping[str, Any]
    wall: float | None
    elapsed_s: float | None
    step: int | None


@dataclass(frozen=True)
class StartEvent(TrainerEvent):
    """A process of the trainer has started; `resumed_from` is the step of the checkpoint that it resumes from."""

    device: str | None
    cuda_name: str | None
    torch: str | None
    python: str | None
    precision: str | None
    world_size: int | None
    parameters: int | None
    tokens_per_step: int | None
    micro_batch: int | None
    steps: int | None
    resumed_from: int | None
    train_tokens: int | None


@dataclass(frozen=True)
class StepEvent(TrainerEvent):
    """A report of the trainer after an optimiser step. `step_s` is the median time of a step since the last report.

    `tokens` is the total so far. `mfu`, the share of the GPU's peak speed, is from 0 to 1. `steps` is the total number
    of steps, in the events of a command that reports it.
    """

    loss: float | None
    lr: float | None
    grad_norm: float | None
    tokens_per_s: float | None
    mfu: float | None
    step_s: float | None
    tokens: int | None
    memory_peak_bytes: int | None
    steps: int | None


@dataclass(frozen=True)
class EvaluationEvent(TrainerEvent):
    """A validation loss, how long the evaluation took, and related figures; `hellaswag` is a share of solved items."""

    val_loss: float | None
    bits_per_byte: float | None
    hellaswag: float | None
    eval_s: float | None
    tokens: int | None


@dataclass(frozen=True)
class CoreScoreEvent(TrainerEvent):
    """The CORE score after the last step, over `core_items` items of the bundle with the digest `bundle_sha256`."""

    core: float | None
    core_items: int | None
    bundle_sha256: str | None


@dataclass(frozen=True)
class SampleEvent(TrainerEvent):
    """The text that the model wrote for a prompt; `text` is None if the line has none."""

    prompt: str
    text: str | None


@dataclass(frozen=True)
class CheckpointEvent(TrainerEvent):
    """A checkpoint is on the machine's disk. The training paused for `stall_s` to write it."""

    bytes: int | None
    stall_s: float | None


@dataclass(frozen=True)
class AlertEvent(TrainerEvent):
    """A `warning`: something that the user should know, and that does not stop the training."""

    code: str
    message: str


@dataclass(frozen=True)
class StopEvent(TrainerEvent):
    """The end of the training, with the trainer's reason."""

    reason: str
    message: str
    train_s: float | None


@dataclass(frozen=True)
class TrialEvent(TrainerEvent):
    """The current state of one trial of a sweep: `running`, done, pruned, failed, stopped, or its loss became nan.

    `result` is the figure by which trials are ranked; `why` explains a failure. `is_restored` means that the trial ran
    in an earlier run, or on an earlier machine of this run (see `later_of_trial`).
    """

    trial: int | None
    state: str
    params: Mapping[str, str]
    steps: int | None
    loss: float | None
    val_loss: float | None
    result: float | None
    tokens: int | None
    seconds: float | None
    why: str
    is_restored: bool

    @property
    def is_under_way(self) -> bool:
        """Return whether the trial is still running, and the event only reports its progress."""
        return self.state == "running" and self.step is not None

    @property
    def is_ranked(self) -> bool:
        """Return whether the trial has a result that may be the best one."""
        return self.result is not None and self.state in ("done", "stopped")

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Return the sort key of trials, best first, as on the machine: finished trials come before stopped ones."""
        return not self.is_ranked, self.state != "done", self.result if self.result is not None else 0.0


def later_of_trial(before: TrialEvent | None, event: TrialEvent) -> TrialEvent:
    """Return the state of a trial after its next event; `before` is its state so far, None if this is the first event.

    In the returned state, `is_restored` only means an earlier run. The run's next machine also reports a trial of the
    machine before as restored, but this run has paid for that trial.
    """
    if event.is_restored and before is not None and not before.is_restored:
        return replace(event, is_restored=False)
    return event


@dataclass(frozen=True)
class FilesLeft:
    """A group of files on the machine: their number, their bytes in all, and name and size of the first of them."""

    files: int
    bytes: int
    first: tuple[tuple[str, int], ...] = ()

    def ending_in(self, suffixes: tuple[str, ...]) -> FilesLeft:
        """Return the group of those in `first` whose names end with one of the suffixes, in any case of letters."""
        first = tuple((name, size) for name, size in self.first if name.lower().endswith(suffixes))
        return FilesLeft(len(first), sum(size for _, size in first), first)

    @property
    def record(self) -> dict[str, Any]:
        """Return the group as JSON data."""
        first = [{"name": name, "bytes": size} for name, size in self.first]
        return {"files": self.files, "bytes": self.bytes, "first": first}


@dataclass(frozen=True)
class OutputsEvent(TrainerEvent):
    """The files that a command left when it ended, in groups; a group may be empty.

    `published` files come home. `unpublished` files are finished, but the machine could not list them for download.
    `left_behind` files stay on the machine by a rule. `elsewhere` files are outside of the folder that is downloaded.
    `matched` is the number of files for each glob, `unmatched` are the flags whose globs match no new file.
    `still_working` names the processes that were still busy when the command ended.
    """

    published: FilesLeft
    matched: Mapping[str, int]
    unmatched: tuple[str, ...]
    unpublished: FilesLeft
    left_behind: FilesLeft
    elsewhere: FilesLeft
    still_working: tuple[str, ...]

    @property
    def record(self) -> dict[str, Any]:
        """Return the data for the journal: the counts of `published`, and each other part if it is not empty."""
        kinds = {name: getattr(self, name) for name in ("unpublished", "left_behind", "elsewhere")}
        words = {name: list(getattr(self, name)) for name in ("unmatched", "still_working")}
        return {
            "files": self.published.files,
            "bytes": self.published.bytes,
            "matched": dict(self.matched),
            **{name: left.record for name, left in kinds.items() if left.files},
            **{name: value for name, value in words.items() if value},
        }


def parse_event(line: bytes | str) -> TrainerEvent | None:
    """Return the event of one line; None for anything but a JSON object with a `kind`. This never raises."""
    if not line or len(line) > LINE_BYTES:
        return None
    try:
        return make_event(parse_object(line.decode("utf-8", "replace") if isinstance(line, bytes) else line))
    except Malformed:
        return None


def make_event(data: Mapping[str, Any]) -> TrainerEvent | None:
    """Return the event of a line's object; None if it has no `kind`."""
    kind = data.get("kind")
    if not isinstance(kind, str):
        return None
    record, readers = _KINDS.get(kind, (TrainerEvent, {}))
    fields = {name: read(data.get(name)) for name, read in {**_EVERY, **readers}.items()}
    return record(kind=plain_line(kind), said=data, **fields)


def events_of(path: Path) -> Iterator[TrainerEvent]:
    """Yield the events of a file, which may be huge or hostile. Skip invalid lines; a missing file has no events."""
    return (event for line in lines_of(path) if (event := parse_event(line)) is not None)


class EventLines:
    """A parser of an arriving stream of events, which keeps an incomplete line until its rest arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, piece: bytes) -> list[TrainerEvent]:
        """Take the next piece of the stream, and return the events that it completes."""
        *lines, rest = (self._rest + piece).split(b"\n")
        self._rest = rest[: LINE_BYTES + 1]
        return [event for line in lines if (event := parse_event(line)) is not None]


def _parse_seconds(value: Any) -> float | None:
    seconds = number(value)
    return seconds if seconds is not None and 0 <= seconds < _LONGEST_S else None


def _parse_wall(value: Any) -> float | None:
    wall = number(value)
    return wall if wall is not None and 0 <= wall < _LATEST_WALL else None


def _parse_word(value: Any) -> str | None:
    return plain_line(value) if isinstance(value, str) else None


def _parse_name(value: Any) -> str:
    return _parse_word(value) or ""


def _parse_optional_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    return _COMMANDS.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", value[:_MOST_CHARS])


def _parse_text(value: Any) -> str:
    return _parse_optional_text(value) or ""


def _parse_files_left(value: Any) -> FilesLeft:
    """Return a group of files; an invalid value is an empty group. It counts at least as many files as it names."""
    data = value if isinstance(value, dict) else {}
    named = [
        file for file in _cap_list(data.get("first")) if isinstance(file, dict) and isinstance(file.get("name"), str)
    ]
    first = tuple((plain_line(file["name"], _NAME_CHARS), whole(file.get("bytes")) or 0) for file in named)
    return FilesLeft(max(whole(data.get("files")) or 0, len(first)), whole(data.get("bytes")) or 0, first)


def _parse_matched_counts(value: Any) -> dict[str, int]:
    items = list(value.items())[:_MOST_NAMED] if isinstance(value, dict) else []
    return {plain_line(str(glob), _NAME_CHARS): whole(count) or 0 for glob, count in items}


def _parse_params(value: Any) -> dict[str, str]:
    items = list(value.items())[:_MOST_NAMED] if isinstance(value, dict) else []
    return {plain_line(str(name)): plain_line(str(text)) for name, text in items}


def _parse_words(value: Any) -> tuple[str, ...]:
    return tuple(plain_line(word, _NAME_CHARS) for word in _cap_list(value) if isinstance(word, str))


def _cap_list(value: Any) -> list[Any]:
    return value[:_MOST_NAMED] if isinstance(value, list) else []


_EVERY: dict[str, Callable[[Any], Any]] = {"wall": _parse_wall, "elapsed_s": _parse_seconds, "step": whole}
_KINDS: dict[str, tuple[Callable[..., TrainerEvent], dict[str, Callable[[Any], Any]]]] = {
    "start": (
        StartEvent,
        dict.fromkeys(("device", "cuda_name", "torch", "python", "precision"), _parse_word)
        | dict.fromkeys(("world_size", "parameters", "tokens_per_step", "micro_batch"), whole)
        | dict.fromkeys(("steps", "resumed_from", "train_tokens"), whole),
    ),
    "step": (
        StepEvent,
        dict.fromkeys(("loss", "lr", "grad_norm", "tokens_per_s", "mfu"), number)
        | {"step_s": _parse_seconds, "tokens": whole, "memory_peak_bytes": whole, "steps": whole},
    ),
    "eval": (
        EvaluationEvent,
        dict.fromkeys(("val_loss", "bits_per_byte", "hellaswag"), number) | {"eval_s": _parse_seconds, "tokens": whole},
    ),
    "core": (CoreScoreEvent, {"core": number, "core_items": whole, "bundle_sha256": _parse_word}),
    "sample": (SampleEvent, {"prompt": _parse_text, "text": _parse_optional_text}),
    "checkpoint": (CheckpointEvent, {"bytes": whole, "stall_s": _parse_seconds}),
    "warning": (AlertEvent, {"code": _parse_name, "message": _parse_text}),
    "outputs": (
        OutputsEvent,
        dict.fromkeys(("published", "unpublished", "left_behind", "elsewhere"), _parse_files_left)
        | {"matched": _parse_matched_counts, "unmatched": _parse_words, "still_working": _parse_words},
    ),
    "trial": (
        TrialEvent,
        {
            "trial": whole,
            "state": _parse_name,
            "params": _parse_params,
            "steps": whole,
            "tokens": whole,
            "seconds": _parse_seconds,
        }
        | dict.fromkeys(("loss", "val_loss", "result"), number)
        | {"why": _parse_name, "is_restored": lambda value: value is True},
    ),
    "stop": (StopEvent, {"reason": _parse_name, "message": _parse_text, "train_s": number}),
}
