"""The trainer's events, one record a line of events.jsonl: the only reader of them (docs/FORMATS.md has every key).

All of it is the machine's word and may be false. Every field is checked here: a figure can be computed with or is None,
a word is one harmless line, a text has no control character but its line ends and tabs, and all are of bounded length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpurun.core.untrusted import LINE_BYTES, Malformed, lines_of, number, parse_object, plain_line, whole

_LONGEST_S = 1e12
_LATEST_WALL = 32_503_680_000.0  # The year 3000: what calendars can format.
_MOST_CHARS = 16 << 10
_MOST_NAMED, _NAME_CHARS = 20, 400
# What a terminal would obey: C0 but for tab and line ends, DEL, C1, what turns the direction of text, halves of pairs.
_COMMANDS = re.compile("[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class TrainerEvent:
    """What every event has; one of a kind that has no record of its own is this alone.

    `wall` is seconds since the epoch, `elapsed_s` seconds since the trainer's process started. `said` is the line as it
    came, for those who pass it on unread.
    """

    kind: str
    said: Mapping[str, Any]
    wall: float | None
    elapsed_s: float | None
    step: int | None


@dataclass(frozen=True)
class StartEvent(TrainerEvent):
    """A process of the trainer has begun; `resumed_from` is the step of the checkpoint that it goes on from."""

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
    """An optimiser step: `step_s` is the median since the line before, `tokens` were seen in all, `mfu` is 0..1.

    `steps` are how many there will be, where only the lines of a command tell it.
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
    """A validation loss, what it took, and the figures beside it; `hellaswag` is the share of its items solved."""

    val_loss: float | None
    bits_per_byte: float | None
    hellaswag: float | None
    eval_s: float | None
    tokens: int | None


@dataclass(frozen=True)
class CoreScoreEvent(TrainerEvent):
    """CORE after the last step, over so many items of the bundle of that digest."""

    core: float | None
    core_items: int | None
    bundle_sha256: str | None


@dataclass(frozen=True)
class SampleEvent(TrainerEvent):
    """What the model wrote after a prompt; `text` is None where the line has none."""

    prompt: str
    text: str | None


@dataclass(frozen=True)
class CheckpointEvent(TrainerEvent):
    """A checkpoint is on the machine's disk; training stood still for `stall_s`."""

    bytes: int | None
    stall_s: float | None


@dataclass(frozen=True)
class AlertEvent(TrainerEvent):
    """A `warning`: something that a person should know and that does not stop training."""

    code: str
    message: str


@dataclass(frozen=True)
class StopEvent(TrainerEvent):
    """Why training ended, as the trainer itself says."""

    reason: str
    message: str
    train_s: float | None


@dataclass(frozen=True)
class TrialEvent(TrainerEvent):
    """One trial of a sweep as it is now: it is `running`, done, pruned, failed, stopped, or lost its loss (nan).

    `result` is the figure by which trials are ranked, `why` says how one failed. One that `is_restored` ran in an
    earlier run.
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
        """Whether it says no more than how far its trial is."""
        return self.state == "running" and self.step is not None

    @property
    def is_ranked(self) -> bool:
        """Whether it has a result that may be the best."""
        return self.result is not None and self.state in ("done", "stopped")

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """What orders trials, the best first, as the machine keeps them: a finished one comes before a stopped one."""
        return not self.is_ranked, self.state != "done", self.result if self.result is not None else 0.0


def later_of_trial(before: TrialEvent | None, event: TrialEvent) -> TrialEvent:
    """Return what is known of a trial after one more event of it; what this run paid for is its own on each machine.

    On the next machine of a run a trial is restored from the one before, and only then: `is_restored` means an earlier
    run.
    """
    if event.is_restored and before is not None and not before.is_restored:
        return replace(event, is_restored=False)
    return event


@dataclass(frozen=True)
class FilesLeft:
    """Files that stay where they are: how many, their bytes, and the first of them by name with bytes each."""

    files: int
    bytes: int
    first: tuple[tuple[str, int], ...] = ()

    def ending_in(self, suffixes: tuple[str, ...]) -> FilesLeft:
        """Return those of the named ones that end so."""
        first = tuple((name, size) for name, size in self.first if name.lower().endswith(suffixes))
        return FilesLeft(len(first), sum(size for _, size in first), first)

    @property
    def record(self) -> dict[str, Any]:
        """The same as data."""
        first = [{"name": name, "bytes": size} for name, size in self.first]
        return {"files": self.files, "bytes": self.bytes, "first": first}


@dataclass(frozen=True)
class OutputsEvent(TrainerEvent):
    """What a command has left when it ended, in files and bytes; where nothing of a kind is there, it is empty.

    `published` come home. `unpublished` are finished and could not be listed, `left_behind` stay by rule, `elsewhere`
    lie outside of what comes home. `unmatched` are the flags whose globs no new file matches, `still_working` the
    processes that were at work when it ended.
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
        """The same as data, for the journal: only what is not empty, but for what was published."""
        kinds = {name: getattr(self, name) for name in ("unpublished", "left_behind", "elsewhere")}
        words = {name: list(getattr(self, name)) for name in ("unmatched", "still_working")}
        return {
            "files": self.published.files,
            "bytes": self.published.bytes,
            "matched": dict(self.matched),
            **{name: left.record for name, left in kinds.items() if left.files},
            **{name: told for name, told in words.items() if told},
        }


def parse_event(line: bytes | str) -> TrainerEvent | None:
    """The event of a line; None for whatever is not an object with a `kind`. Never raises."""
    if not line or len(line) > LINE_BYTES:
        return None
    try:
        return make_event(parse_object(line.decode("utf-8", "replace") if isinstance(line, bytes) else line))
    except Malformed:
        return None


def make_event(told: Mapping[str, Any]) -> TrainerEvent | None:
    """The event of a line's object; None where it has no `kind`."""
    kind = told.get("kind")
    if not isinstance(kind, str):
        return None
    record, readers = _KINDS.get(kind, (TrainerEvent, {}))
    fields = {name: read(told.get(name)) for name, read in {**_EVERY, **readers}.items()}
    return record(kind=plain_line(kind), said=told, **fields)


def events_of(path: Path) -> Iterator[TrainerEvent]:
    """The events of a file, which may be huge or hostile; a line that is none is passed over. None if no file."""
    return (event for line in lines_of(path) if (event := parse_event(line)) is not None)


class EventLines:
    """Cuts what comes piece by piece into events: half a line waits for the rest of it."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, piece: bytes) -> list[TrainerEvent]:
        """The events that are whole now."""
        *lines, rest = (self._rest + piece).split(b"\n")
        self._rest = rest[: LINE_BYTES + 1]
        return [event for line in lines if (event := parse_event(line)) is not None]


def _seconds(value: Any) -> float | None:
    seconds = number(value)
    return seconds if seconds is not None and 0 <= seconds < _LONGEST_S else None


def _wall(value: Any) -> float | None:
    wall = number(value)
    return wall if wall is not None and 0 <= wall < _LATEST_WALL else None


def _word(value: Any) -> str | None:
    return plain_line(value) if isinstance(value, str) else None


def _name(value: Any) -> str:
    return _word(value) or ""


def _written(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    return _COMMANDS.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", value[:_MOST_CHARS])


def _text(value: Any) -> str:
    return _written(value) or ""


def _left(value: Any) -> FilesLeft:
    """Files that stay; what is not such an object is none, and a count is never below what is named."""
    told = value if isinstance(value, dict) else {}
    named = [one for one in _some(told.get("first")) if isinstance(one, dict) and isinstance(one.get("name"), str)]
    first = tuple((plain_line(one["name"], _NAME_CHARS), whole(one.get("bytes")) or 0) for one in named)
    return FilesLeft(max(whole(told.get("files")) or 0, len(first)), whole(told.get("bytes")) or 0, first)


def _matched(value: Any) -> dict[str, int]:
    told = list(value.items())[:_MOST_NAMED] if isinstance(value, dict) else []
    return {plain_line(str(glob), _NAME_CHARS): whole(count) or 0 for glob, count in told}


def _params(value: Any) -> dict[str, str]:
    told = list(value.items())[:_MOST_NAMED] if isinstance(value, dict) else []
    return {plain_line(str(name)): plain_line(str(text)) for name, text in told}


def _words(value: Any) -> tuple[str, ...]:
    return tuple(plain_line(one, _NAME_CHARS) for one in _some(value) if isinstance(one, str))


def _some(value: Any) -> list[Any]:
    return value[:_MOST_NAMED] if isinstance(value, list) else []


_EVERY: dict[str, Callable[[Any], Any]] = {"wall": _wall, "elapsed_s": _seconds, "step": whole}
_KINDS: dict[str, tuple[Callable[..., TrainerEvent], dict[str, Callable[[Any], Any]]]] = {
    "start": (
        StartEvent,
        dict.fromkeys(("device", "cuda_name", "torch", "python", "precision"), _word)
        | dict.fromkeys(("world_size", "parameters", "tokens_per_step", "micro_batch"), whole)
        | dict.fromkeys(("steps", "resumed_from", "train_tokens"), whole),
    ),
    "step": (
        StepEvent,
        dict.fromkeys(("loss", "lr", "grad_norm", "tokens_per_s", "mfu"), number)
        | {"step_s": _seconds, "tokens": whole, "memory_peak_bytes": whole, "steps": whole},
    ),
    "eval": (
        EvaluationEvent,
        dict.fromkeys(("val_loss", "bits_per_byte", "hellaswag"), number) | {"eval_s": _seconds, "tokens": whole},
    ),
    "core": (CoreScoreEvent, {"core": number, "core_items": whole, "bundle_sha256": _word}),
    "sample": (SampleEvent, {"prompt": _text, "text": _written}),
    "checkpoint": (CheckpointEvent, {"bytes": whole, "stall_s": _seconds}),
    "warning": (AlertEvent, {"code": _name, "message": _text}),
    "outputs": (
        OutputsEvent,
        dict.fromkeys(("published", "unpublished", "left_behind", "elsewhere"), _left)
        | {"matched": _matched, "unmatched": _words, "still_working": _words},
    ),
    "trial": (
        TrialEvent,
        {"trial": whole, "state": _name, "params": _params, "steps": whole, "tokens": whole, "seconds": _seconds}
        | dict.fromkeys(("loss", "val_loss", "result"), number)
        | {"why": _name, "is_restored": lambda value: value is True},
    ),
    "stop": (StopEvent, {"reason": _name, "message": _text, "train_s": number}),
}
