"""The trials of a sweep as a table: in the live view and on a receipt."""

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
    """A trial as a row. `loss` is its result or, while it has no result, its latest loss."""

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
    """Return the table in at most `most` lines: running trials, then the best, then a line that counts the rest."""
    order = sorted(
        trials, key=lambda trial: (trial.state != "running", not trial.is_best, _sort_key(trial), trial.number)
    )
    room = max(1, most - 1)
    shown, left = (order, []) if len(order) <= room else (order[: max(1, room - 1)], order[max(1, room - 1) :])
    lines = table(_COLUMNS, [_cells(trial) for trial in shown], style)
    if left:
        states = [trial.state for trial in left]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines.append(line(Span(f"  and {len(left)} more: {counts}", "dim")))
    return lines[:most]


def _sort_key(trial: TrialLine) -> tuple[bool, bool, float]:
    is_ranked = trial.loss is not None and trial.state in ("done", "stopped")
    return not is_ranked, trial.state != "done", trial.loss or 0.0


def _cells(trial: TrialLine) -> list[Span]:
    of = f"/{format_whole(trial.steps)}" if trial.steps else ""
    settings = ", ".join(
        f"{_shorten_setting_name(name, trial.params)} {safe_line(value)}" for name, value in trial.params.items()
    )
    return [
        Span(f"{trial.number:03d}"),
        Span(
            "best" if trial.is_best else safe_line(trial.state),
            "good" if trial.is_best else _LOOKS.get(trial.state, ""),
        ),
        Span(UNKNOWN if trial.step is None else f"{format_whole(trial.step)}{of}"),
        Span(format_loss(trial.loss), "title" if trial.is_best else ""),
        Span(UNKNOWN if trial.seconds is None else format_duration(trial.seconds)),
        Span(format_usd(trial.micros) if trial.micros else UNKNOWN, "money"),
        Span(settings + (f"  {safe_line(trial.why)}" if trial.why else "")),
    ]


def _shorten_setting_name(name: str, names: Mapping[str, str]) -> str:
    """Return the last part of a setting's name; the whole name if another name ends with the same part."""
    last = name.rpartition(".")[2]
    return safe_line(last if sum(other.rpartition(".")[2] == last for other in names) == 1 else name)
