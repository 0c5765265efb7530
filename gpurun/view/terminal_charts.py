"""A line chart of braille dots, and a sparkline, both also in ASCII.

A braille cell has 2 by 4 dots; the bit values by column and row are those of the Unicode block U+2800. A cell of the
ASCII chart has 1 by 2 dots, drawn with `'`, `.` and `:`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]

_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BARS = "▁▂▃▄▅▆▇█"
_RINGS = 12
_ASCII_BARS = "_.-=+*%#"


@dataclass(frozen=True)
class Scale:
    """The values at the two ends of an axis."""

    low: float
    high: float

    def place(self, value: float, steps: int) -> int:
        """Return the position of a value, from 0 to `steps` - 1. A value beyond an end is placed at that end."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return min(steps - 1, max(0, round(share * (steps - 1))))


def scale_of(values: Sequence[float]) -> Scale:
    """Return a scale around the finite values, with round numbers as its ends; without values, from 0 to 1."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Scale(0.0, 1.0)
    low, high = min(finite), max(finite)
    span = max(high - low or abs(high) or 1.0, sys.float_info.min)  # A tenth of a smaller number cannot be represented.
    unit = 10.0 ** math.floor(math.log10(span))
    unit /= 10 if span / unit < 2 else 5 if span / unit < 5 else 2
    bottom, top = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    return Scale(bottom, top if top > bottom else bottom + unit)


def line_chart(
    points: Sequence[Point],
    *,
    width: int,
    height: int,
    marks: Sequence[Point] = (),
    unicode: bool = True,
    x_name: str = "step",
) -> list[str]:
    """Return a chart of `height` rows plus one for the x axis, at most `width` cells wide. `marks` become rings.

    Points that are not finite are left out. The x axis runs from 0 to the largest x. Both ends of both axes are
    labelled.
    """
    drawn, rings = _select_finite(points), _even_selection(_select_finite(marks))
    y_axis = scale_of([y for _, y in (*drawn, *rings)])
    x_axis = Scale(0.0, max((x for x, _ in (*drawn, *rings)), default=1.0))
    labels = _y_labels(y_axis, height)
    margin = max(len(label) for label in labels) + 2
    columns = max(4, width - margin)
    rows = _plot(drawn, x_axis, y_axis, columns, height, unicode)
    for x, y in rings:
        row = height - 1 - y_axis.place(y, height)
        column = x_axis.place(x, columns)
        rows[row][column] = "○" if unicode else "o"
    edge = "┤" if unicode else "+"
    bar = "│" if unicode else "|"
    body = [
        f"{label:>{margin - 2}} {edge if label else bar}{''.join(row).rstrip()}"
        for label, row in zip(labels, rows, strict=True)
    ]
    return [*body, _x_labels(x_axis.high, columns, margin, x_name)]


def sparkline(values: Sequence[float], *, width: int, scale: Scale, unicode: bool = True) -> str:
    """Return the last `width` values as bars on a fixed scale. A value that is not finite gives a blank."""
    bars = _BARS if unicode else _ASCII_BARS
    return "".join(bars[scale.place(v, len(bars))] if math.isfinite(v) else " " for v in values[-width:])


def bar(share: float, width: int) -> tuple[str, str]:
    """Return the full and the empty part of a progress bar."""
    full = min(width, max(0, int(share * width))) if math.isfinite(share) else 0
    return "█" * full, "░" * (width - full)


def _select_finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _even_selection(points: list[Point]) -> list[Point]:
    """Return at most a dozen of the points, including the last, so that the line behind them stays visible."""
    return points[::-1][:: -(-len(points) // _RINGS) or 1][::-1]


def _plot(
    points: Sequence[Point], x_axis: Scale, y_axis: Scale, columns: int, height: int, unicode: bool
) -> list[list[str]]:
    """Return the cells, row by row from the top. They show the mean of each dot column, joined by straight lines."""
    across, down = (2, 4) if unicode else (1, 2)
    wide, high = columns * across, height * down
    sums: dict[int, list[float]] = {}
    for x, y in points:
        sums.setdefault(x_axis.place(x, wide), []).append(y)
    path = [(column, high - 1 - y_axis.place(sum(ys) / len(ys), high)) for column, ys in sorted(sums.items())]
    dots = set(path)
    for (x0, y0), (x1, y1) in pairwise(path):
        steps = max(x1 - x0, abs(y1 - y0), 1)
        dots.update((x0 + round(i * (x1 - x0) / steps), y0 + round(i * (y1 - y0) / steps)) for i in range(steps))
    grid = [[0] * columns for _ in range(height)]
    for x, y in dots:
        bit = _BRAILLE[x % 2][y % 4] if unicode else 1 << y % 2
        grid[y // down][x // across] |= bit
    return [[_character(bits, unicode) for bits in row] for row in grid]


def _character(bits: int, unicode: bool) -> str:
    if unicode:
        return chr(0x2800 + bits) if bits else " "
    return " '.:"[bits]


def _y_labels(axis: Scale, height: int) -> list[str]:
    """Return one label per row. Only the top, the bottom and, in a tall chart, the middle are labelled."""
    labels = [""] * height
    labels[-1], labels[0] = _tick(axis.low), _tick(axis.high)
    if height >= 5 and height % 2:
        labels[height // 2] = _tick((axis.low + axis.high) / 2)
    return labels


def _x_labels(highest: float, columns: int, margin: int, name: str) -> str:
    """Return the labels of the x axis: `0`, the name in the middle, and the largest x at the right end."""
    end = f"{highest:,.0f}".replace(",", " ")
    space = columns - 1 - len(end)
    middle = f"{name:^{space}}" if space >= len(name) + 2 else " " * max(1, space)
    return " " * margin + f"0{middle}{end}"


def _tick(value: float) -> str:
    if value and (abs(value) >= 1000 or abs(value) < 0.01):
        return f"{value:.1e}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
