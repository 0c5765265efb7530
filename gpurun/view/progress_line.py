"""The progress of a transfer or a set-up as one line: the amount done, the rate, the time left."""

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


def moving_words(moving: Moving) -> str:
    """Return progress for a log, such as "1.2 GB of 4.7 GB, 38 MB/s, 1 m 32 s left", and the last line of its words."""
    last = next((shown for words in reversed(moving.words.split("\n")) if (shown := safe_line(words).strip())), "")
    far = _how_far(moving)
    return f"{far} · {clip(last, _MOST_WORDS)}" if last else far


def _how_far(moving: Moving) -> str:
    if moving.what in ("boot", "setup", "look", "wait"):
        return f"{format_duration(moving.done)} of {format_duration(moving.total)}"
    parts = [f"{format_bytes(moving.done)} of {format_bytes(moving.total)}"]
    rate = moving.bytes_per_s
    if rate is not None:
        left_s = max(0, moving.total - moving.done) / rate
        parts += [f"{format_bytes(rate)}/s", f"{format_duration(left_s)} left"]
    return ", ".join(parts)


def moving_line(moving: Moving, style: Style, *, label: int) -> Line:
    """Return the progress as one line, with a bar if there is room for one."""
    before, after = pad(Span(f" {_LABELS[moving.what]}", "dim"), label), line(f"  {moving_words(moving)}")
    room = style.width - label - count_cells(after) - 1
    full, empty = bar(moving.done / moving.total, min(_BAR_CELLS, room)) if room >= 8 else ("", "")
    return (*before, Span(full, "accent"), Span(empty, "dim"), *after)
