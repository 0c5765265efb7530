"""Hears the trainer's log and events once more, for the audit alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gpurun.core.paths import RunFolder
from gpurun.ledger.audit.lines import Json
from gpurun.ledger.untrusted import events_of, lines_of, plain_data, plain_line, plain_text

_START = ("device", "cuda_name", "torch", "python", "world_size", "parameters", "tokens_per_step", "precision", "steps")


@dataclass(frozen=True)
class Words:
    """What log and events say; the fields are those of the receipt, and `told` has the events themselves."""

    lines: list[str]
    device: str
    start: Json | None
    figures: Json
    sample: Json | None
    told: list[Json]


def hear(folder: RunFolder) -> Words:
    """Read what the trainer said in a run. Only lines of the five known forms are kept, so memory stays small."""
    known = re.compile(
        r"(?P<device>device: (?:cuda|cpu))|(?P<name>cuda_name: .+)|(?P<size>parameters: [\d,]+)"
        r"|(?P<step>step \d+ \| loss \S+ \|.*)|(?P<saved>checkpoint: \S+)"
    )
    heard: dict[str, list[str]] = {"device": [], "name": [], "size": [], "step": [], "saved": []}
    for line in lines_of(folder.log):
        match = known.fullmatch(line)
        if match is not None and match.lastgroup is not None:
            heard[match.lastgroup].append(plain_line(line))
    steps = heard["step"]
    few = [steps[place] for place in sorted({0, (len(steps) - 1) // 2, len(steps) - 1})] if steps else []
    lines = heard["device"][:1] + heard["name"][:1] + heard["size"][:1] + few + heard["saved"][-1:]
    told = [event for event in events_of(folder.events) if isinstance(event.get("kind"), str)]
    starts = [event for event in told if event["kind"] == "start"]
    said = heard["device"][0].split(" ")[1] if heard["device"] else ""
    agreed = bool(starts) and all(str(event.get("device")) == said for event in starts)
    return Words(
        lines=lines,
        device=said if agreed else "",
        start={key: plain_data(starts[0].get(key)) for key in _START} if starts else None,
        figures=_figures(told),
        sample=_sample([event for event in told if event["kind"] == "sample"]),
        told=told,
    )


def _figures(told: list[Json]) -> Json:
    steps = [event for event in told if event["kind"] == "step"] or [{}]
    evals = [event for event in told if event["kind"] == "eval"] or [{}]
    stops = [event for event in told if event["kind"] == "stop"] or [{}]
    val_losses = [loss for loss in (_real(event.get("val_loss")) for event in evals) if loss is not None]
    return {
        "first_step": _whole(steps[0].get("step")),
        "first_loss": _real(steps[0].get("loss")),
        "last_step": _whole(steps[-1].get("step")),
        "last_loss": _real(steps[-1].get("loss")),
        "last_val_loss": _real(evals[-1].get("val_loss")),
        "best_val_loss": min(val_losses, default=None),
        "tokens": _whole(steps[-1].get("tokens")),
        "train_s": _real(stops[-1].get("train_s")),
    }


def _real(value: Any) -> float | None:
    plain = plain_data(value)
    return None if isinstance(plain, bool) or not isinstance(plain, int | float) else float(plain)


def _whole(value: Any) -> int | None:
    plain = plain_data(value)
    return plain if type(plain) is int else None


def _sample(samples: list[Json]) -> Json | None:
    if not samples:
        return None
    last = samples[-1]
    prompt, text = plain_line(str(last.get("prompt") or "")), plain_text(str(last.get("text") or ""))
    return {"step": _whole(last.get("step")), "prompt": prompt, "text": text}
