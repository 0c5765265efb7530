"""How far a transfer or a set-up is, as one line: what is there, at what rate, how long it still takes."""

from __future__ import annotations

from gpurun.core.transfer_progress import Moving
from gpurun.core.untrusted import safe_line
from gpurun.view.number_format import format_bytes, format_duration
from gpurun.view.style import Style
from gpurun.view.styled_text import Line, Span, clip, count_cells, line, pad
from gpurun.view.terminal_charts import bar

_LABELS = {"stage": "stage", "boot": "wait", "setup": "set-up", "look": "look", "ship": "send", "collect": "fetch"}
_LABELS |= {"wait": "wait"}
_BAR_CELLS, _MOST_WORDS = 60, 100


def moving_words(told: Moving) -> str:
    """As in a log: "1.2 GB of 4.7 GB, 38 MB/s, 1 m 32 s left", or "2 m 10 s of 10 m"; then the last words there are."""
    last = next((shown for one in reversed(told.words.split("\n")) if (shown := safe_line(one).strip())), "")
    far = _how_far(told)
    return f"{far} · {clip(last, _MOST_WORDS)}" if last else far


def _how_far(told: Moving) -> str:
    if told.what in ("boot", "setup", "look", "wait"):
        return f"{format_duration(told.done)} of {format_duration(told.total)}"
    parts = [f"{format_bytes(told.done)} of {format_bytes(told.total)}"]
    rate = told.bytes_per_s
    if rate is not None:
        left_s = max(0, told.total - told.done) / rate
        parts += [f"{format_bytes(rate)}/s", f"{format_duration(left_s)} left"]
    return ", ".join(parts)


def moving_line(told: Moving, style: Style, *, label: int) -> Line:
    """The same with a bar, where there is room for one."""
    before, after = pad(Span(f" {_LABELS[told.what]}", "dim"), label), line(f"  {moving_words(told)}")
    room = style.width - label - count_cells(after) - 1
    full, empty = bar(told.done / told.total, min(_BAR_CELLS, room)) if room >= 8 else ("", "")
    return (*before, Span(full, "accent"), Span(empty, "dim"), *after)
