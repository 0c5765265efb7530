"""Trials of a sweep as a table: in the live view, on a receipt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpurun.core.money import Micros, format_usd
from gpurun.core.untrusted import safe_line
from gpurun.view.number_format import UNKNOWN, format_duration, format_loss, format_whole
from gpurun.view.style import Style
from gpurun.view.styled_text import Line, Span, line
from gpurun.view.table import Column, table

_LOOKS = {"running": "accent", "done": "good", "pruned": "dim", "failed": "bad", "nan": "warn", "stopped": "warn"}
_COLUMNS = (
    Column("TRIAL", right=True),
    Column("STATE"),
    Column("STEP", right=True, leaves=2),
    Column("LOSS", right=True),
    Column("TOOK", right=True, leaves=3),
    Column("COST", right=True, leaves=1),
    Column("SETTINGS", least=12),
)


@dataclass(frozen=True)
class TrialLine:
    """What a table shows of one trial; `loss` ranks it, or is the last one while it has no result."""

    number: int
    state: str
    params: Mapping[str, str]
    step: int | None
    steps: int | None
    loss: float | None
    seconds: float | None
    micros: Micros | None
    why: str = ""
    is_best: bool = False


def trial_table(trials: Sequence[TrialLine], style: Style, *, most: int) -> list[Line]:
    """Return at most so many lines, heading and a word about the others included: what runs, then the best."""
    order = sorted(trials, key=lambda one: (one.state != "running", not one.is_best, _key(one), one.number))
    room = max(1, most - 1)
    shown, left = (order, []) if len(order) <= room else (order[: max(1, room - 1)], order[max(1, room - 1) :])
    lines = table(_COLUMNS, [_cells(one) for one in shown], style)
    if left:
        states = [one.state for one in left]
        told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines.append(line(Span(f"  and {len(left)} more: {told}", "dim")))
    return lines[:most]


def _key(one: TrialLine) -> tuple[bool, bool, float]:
    is_ranked = one.loss is not None and one.state in ("done", "stopped")
    return not is_ranked, one.state != "done", one.loss or 0.0


def _cells(one: TrialLine) -> list[Span]:
    of = f"/{format_whole(one.steps)}" if one.steps else ""
    settings = ", ".join(f"{_short(name, one.params)} {safe_line(value)}" for name, value in one.params.items())
    return [
        Span(f"{one.number:03d}"),
        Span("best" if one.is_best else safe_line(one.state), "good" if one.is_best else _LOOKS.get(one.state, "")),
        Span(UNKNOWN if one.step is None else f"{format_whole(one.step)}{of}"),
        Span(format_loss(one.loss), "title" if one.is_best else ""),
        Span(UNKNOWN if one.seconds is None else format_duration(one.seconds)),
        Span(format_usd(one.micros) if one.micros else UNKNOWN, "money"),
        Span(settings + (f"  {safe_line(one.why)}" if one.why else "")),
    ]


def _short(name: str, names: Mapping[str, str]) -> str:
    """Return the last word of a setting's name, where no other has the same."""
    last = name.rpartition(".")[2]
    return safe_line(last if sum(other.rpartition(".")[2] == last for other in names) == 1 else name)
