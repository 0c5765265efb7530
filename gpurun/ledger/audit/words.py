"""Hears the trainer's log and events once more, for the audit alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpurun.core.paths import RunFolder
from gpurun.ledger.audit.lines import Json
from gpurun.ledger.untrusted import events_of, lines_of, plain_data, plain_line, plain_text

_START = ("device", "cuda_name", "torch", "python", "world_size", "parameters", "tokens_per_step", "precision", "steps")


_KNOWN = re.compile(
    r"(?P<device>device: (?:cuda|cpu))|(?P<name>cuda_name: .+)|(?P<size>parameters: [\d,]+)"
    r"|(?P<code>code: embedding trainer/\S+ \| .+)|(?P<step>step \d+ \| loss \S+ \|.*)|(?P<saved>checkpoint: \S+)"
)


@dataclass(frozen=True)
class Words:
    """What log and events say; the fields are those of the receipt."""

    lines: list[str]
    device: str
    start: Json | None
    figures: Json
    sample: Json | None


def hear(folder: RunFolder) -> Words:
    """Read what the trainer said in a run. A hostile machine may say a lot: only what stands here is kept of it."""
    lines, said = _log(folder)
    ends: dict[str, tuple[Json, Json]] = {}
    agreed, best = True, None
    for event in told_in(folder):
        kind = event["kind"]
        if kind in ("start", "step", "eval", "sample", "stop"):
            ends[kind] = (ends[kind][0] if kind in ends else event, event)
        agreed = agreed and (kind != "start" or str(event.get("device")) == said)
        loss = _real(event.get("val_loss")) if kind == "eval" else None
        best = loss if best is None or (loss is not None and loss < best) else best
    start, sample = ends.get("start"), ends.get("sample")
    return Words(
        lines=lines,
        device=said if agreed and start else "",
        start={key: plain_data(start[0].get(key)) for key in _START} if start else None,
        figures=_figures(ends, best),
        sample=_sample(sample[1]) if sample else None,
    )


def told_in(folder: RunFolder) -> Iterator[Json]:
    """The trainer's events, one after the other."""
    return (event for event in events_of(folder.events) if isinstance(event.get("kind"), str))


def _log(folder: RunFolder) -> tuple[list[str], str]:
    """The lines of the log that a receipt quotes, and the device that it names first."""
    firsts: dict[str, str] = {}
    saved: list[str] = []
    steps = 0
    for form, line in _forms(folder):
        firsts.setdefault(form, line)
        saved = [line] if form == "saved" else saved
        steps += form == "step"
    places = {0, (steps - 1) // 2, steps - 1}
    few = [
        line for place, line in enumerate(line for form, line in _forms(folder) if form == "step") if place in places
    ]
    lines = [firsts[form] for form in ("device", "name", "size", "code") if form in firsts] + few + saved
    return lines, firsts["device"].split(" ")[1] if "device" in firsts else ""


def _forms(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """Every line of one of the known forms, with the form's name."""
    for line in lines_of(folder.log):
        match = _KNOWN.fullmatch(line)
        if match is not None and match.lastgroup is not None:
            yield match.lastgroup, plain_line(line)


def _figures(ends: Mapping[str, tuple[Json, Json]], best: float | None) -> Json:
    """The figures of the first and the last event of each kind."""
    nothing: tuple[Json, Json] = ({}, {})
    first, last = ends.get("step", nothing)
    return {
        "first_step": _whole(first.get("step")),
        "first_loss": _real(first.get("loss")),
        "last_step": _whole(last.get("step")),
        "last_loss": _real(last.get("loss")),
        "last_val_loss": _real(ends.get("eval", nothing)[1].get("val_loss")),
        "best_val_loss": best,
        "tokens": _whole(last.get("tokens")),
        "train_s": _real(ends.get("stop", nothing)[1].get("train_s")),
    }


def _real(value: Any) -> float | None:
    plain = plain_data(value)
    return None if isinstance(plain, bool) or not isinstance(plain, int | float) else float(plain)


def _whole(value: Any) -> int | None:
    plain = plain_data(value)
    return plain if type(plain) is int else None


def _sample(last: Json) -> Json:
    prompt, text = plain_line(str(last.get("prompt") or "")), plain_text(str(last.get("text") or ""))
    return {"step": _whole(last.get("step")), "prompt": prompt, "text": text}
