"""How far a transfer is, as one line: what is there, at what rate, how long it still takes."""

from __future__ import annotations

from gpurun.core.moving import Moving
from gpurun.view.charts import bar
from gpurun.view.paint import Line, Span, line, pad, width_of
from gpurun.view.quantities import format_bytes, format_duration
from gpurun.view.style import Style

_LABELS = {"stage": "stage", "ship": "send", "collect": "fetch"}
_BAR_CELLS = 60


def moving_words(told: Moving) -> str:
    """As in a log: "1.2 GB of 4.7 GB, 38 MB/s, 1 m 32 s left"."""
    parts = [f"{format_bytes(told.done_bytes)} of {format_bytes(told.total_bytes)}"]
    rate = told.bytes_per_s
    if rate is not None:
        left_s = max(0, told.total_bytes - told.done_bytes) / rate
        parts += [f"{format_bytes(rate)}/s", f"{format_duration(left_s)} left"]
    return ", ".join(parts)


def moving_line(told: Moving, style: Style, *, label: int) -> Line:
    """The same with a bar, where there is room for one."""
    before, after = pad(Span(f" {_LABELS[told.what]}", "dim"), label), line(f"  {moving_words(told)}")
    room = style.width - label - width_of(after) - 1
    full, empty = bar(told.done_bytes / told.total_bytes, min(_BAR_CELLS, room)) if room >= 8 else ("", "")
    return (*before, Span(full, "accent"), Span(empty, "dim"), *after)
