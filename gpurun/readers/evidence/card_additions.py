"""Collects what a card shows in addition to the receipt: code, device, losses, and a quoted sample."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.core.paths import RunFolder
from gpurun.core.run_plan import Plan
from gpurun.core.trainer_events import StepEvent, events_of
from gpurun.core.untrusted import lines_of, plain_line

_DEVICE = re.compile(r"\b(?:cuda|devices?|gpus?)(?![A-Za-z])", re.IGNORECASE)
_SAMPLE = re.compile(
    r"\W*(?:generated|generation|samples?|sampled)\b(?!\W*\d)(?!\W*(?:rate|size|count|seen)\b)", re.IGNORECASE
)
_AFTER_SAMPLE = re.compile(r"\W*(?:step|iter|iteration|epoch|saved?|saving|checkpoint|wrote|loss)\b", re.IGNORECASE)
_MOST_DEVICE_LINES, _MOST_SAMPLE_LINES, _MOST_POINTS = 4, 24, 500
_PRIVATE = "[a line with the path of a folder on this computer]"


@dataclass(frozen=True)
class CardAdditions:
    """Rows for the card's table, quoted log lines by title, and (step, loss) pairs for the curve."""

    rows: tuple[tuple[str, str], ...]
    quoted: tuple[tuple[str, tuple[str, ...]], ...]
    losses: tuple[tuple[int, float], ...]


def card_additions(
    folder: RunFolder, plan: Plan, predicate: Mapping[str, Any], private: Sequence[str]
) -> CardAdditions:
    """Return the additions to a run's card, read from its folder. `private` are folders that must not appear in a card.

    Log lines are shown as quotations, because their content is not checked.
    """
    losses = _read_losses(folder)
    devices, sample = _quotable_lines(folder.log)
    rows = [(name, plain_line(text)) for name, text in plan.job.code(plan, Path(folder.now_at(plan.data.beside)))]
    rows += [("CUDA", f"{words}, as reported by the machine") for words in _describe_cuda(predicate["instance"])]
    if devices:
        rows.append(("CUDA in the log", " · ".join(f"“{line}”" for line in _shareable_lines(devices, private))))
    if losses:
        (first, start), (last, end) = losses[0], losses[-1]
        words = f"{start:.4f} at step {first:,}, {end:.4f} at step {last:,}, the lowest {min(x for _, x in losses):.4f}"
        rows.append(("Losses", f"{words}, from its log"))
    block = ("Sample, quoted from the log", tuple(_shareable_lines(sample, private)))
    quoted = (block,) if sample and predicate["sample"] is None else ()
    return CardAdditions(tuple(rows), quoted, _thin_losses(losses))


def _read_losses(folder: RunFolder) -> list[tuple[int, float]]:
    """Return (step, loss) for each step with a loss; if a step was reported twice, the later value."""
    steps = (event for event in events_of(folder.events) if isinstance(event, StepEvent))
    return sorted({step.step: step.loss for step in steps if step.step is not None and step.loss is not None}.items())


def _thin_losses(losses: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return evenly spaced losses, including the first and the last."""
    if len(losses) <= _MOST_POINTS:
        return tuple(losses)
    last = len(losses) - 1
    return tuple(losses[round(place * last / (_MOST_POINTS - 1))] for place in range(_MOST_POINTS))


def _quotable_lines(log: Path) -> tuple[list[str], list[str]]:
    """Return the first lines of a log that mention a device, and the last lines that are marked as a sample."""
    devices: list[str] = []
    sample: list[str] = []
    is_sample = False
    for line in lines_of(log):
        # The label may follow a title that also matches.
        if _SAMPLE.match(line) and not (is_sample and len(sample) == 1):
            sample, is_sample = [line], True
        elif is_sample and (_AFTER_SAMPLE.match(line) or len(sample) == _MOST_SAMPLE_LINES):
            is_sample = False
        elif is_sample:
            sample.append(line)
        elif _DEVICE.search(line) and len(devices) < _MOST_DEVICE_LINES and line not in devices:
            devices.append(line)
    while sample and not sample[-1].strip():
        sample.pop()
    return devices, sample if len(sample) > 1 or ":" in "".join(sample) else []


def _shareable_lines(lines: Sequence[str], private: Sequence[str]) -> Iterator[str]:
    """Yield the lines without control characters. A line with a private path is replaced by a note."""
    for line in lines:
        own = any(len(folder) > 1 and folder in line for folder in private)
        yield _PRIVATE if own else plain_line(line.strip("\r\n"))


def _describe_cuda(machine: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a sentence about torch and the GPUs, as the machine reported them before the run began."""
    hello = ((machine or {}).get("facts") or {}).get("hello") or {}
    torch = hello.get("torch") or {}
    if not torch.get("version"):
        return
    names = [plain_line(str(device.get("name"))) for device in torch.get("devices") or ()]
    built = f", built for CUDA {torch['cuda']}" if torch.get("cuda") else ""
    drivers = sorted({plain_line(str(card.get("driver"))) for card in hello.get("gpus") or ()})
    driver = f", driver {', '.join(drivers)}" if drivers else ""
    yield f"torch {plain_line(str(torch['version']))}{built}, with {', '.join(names) or 'no CUDA device'}{driver}"
