"""A table that fits its width: the least important columns are dropped first, then the widest text is clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpurun.view.number_format import UNKNOWN
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, cells, clip, count_cells, pad, spell, split_words, to_ascii

_GAP = 2
_INDENT = 2
_NARROWEST = 6


@dataclass(frozen=True)
class Column:
    """A heading and the behaviour of its cells.

    `leaves` is the order in which columns are dropped on a narrow terminal: the highest first, 0 never. `least` is for
    free text: the width to which it may be clipped before a column is dropped. 0 means that it is not clipped then.
    """

    title: str
    right: bool = False
    leaves: int = 0
    least: int = 0


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], style: Style) -> list[Line]:
    """Return a heading and the rows. A column without any known value is left out."""
    heading = [spell(Span(column.title, "dim"), style) for column in columns]
    spelled = [[spell(cell, style) for cell in row] for row in rows]
    nothing = ("", UNKNOWN, to_ascii(UNKNOWN))
    shown = [i for i in range(len(columns)) if not rows or any(r[i].text not in nothing for r in spelled)]
    widths = {i: max(cells(row[i].text) for row in [heading, *spelled]) for i in shown}
    _fit_columns(columns, widths, style.width - _INDENT)
    ellipsis = "…" if style.unicode else "..."
    lines: list[Line] = []
    for row in [heading, *spelled]:
        spans: list[Span] = [Span(" " * _INDENT)]
        for place, (i, width) in enumerate(widths.items()):
            cell = Span(clip(row[i].text, width, ellipsis), row[i].look)
            spans.extend((Span(" " * (_GAP if place else 0)), *pad(cell, width, right=columns[i].right)))
        lines.append(_without_trailing(spans))
    return lines


def _fit_columns(columns: Sequence[Column], widths: dict[int, int], room: int) -> None:
    """Drop columns until clipping free text is enough, then restore those for which there is room after all.

    If no further column can be dropped, the widest text is clipped.
    """

    def excess() -> int:
        return sum(widths.values()) + _GAP * (len(widths) - 1) - room

    def slack(i: int) -> int:
        return max(0, widths[i] - columns[i].least) if columns[i].least else 0

    order = list(widths)
    left: list[tuple[int, int]] = []
    while excess() > sum(slack(i) for i in widths):
        leaving = max(widths, key=lambda i: columns[i].leaves)
        if not columns[leaving].leaves:
            break
        left.append((leaving, widths.pop(leaving)))
    for i, width in reversed(left):
        if excess() + _GAP + width <= 0:
            widths[i] = width
    for i in [i for i in order if i in widths]:
        widths[i] = widths.pop(i)
    _clip_columns(columns, widths, excess(), slack)


def _clip_columns(columns: Sequence[Column], widths: dict[int, int], excess: int, slack: Callable[[int], int]) -> None:
    """Narrow columns by `excess` cells in total: columns of free text first, others only if that is not enough."""
    while excess > 0:
        texts = [i for i in widths if not columns[i].right and widths[i] > _NARROWEST]
        widest = max([i for i in texts if slack(i)] or texts, key=lambda i: widths[i], default=None)
        if widest is None:
            return
        taken = min(slack(widest) or widths[widest] - _NARROWEST, excess)
        widths[widest] -= taken
        excess -= taken


def _without_trailing(spans: list[Span]) -> Line:
    while spans and not spans[-1].text.strip():
        spans.pop()
    return tuple(spans)


def fields(pairs: Sequence[tuple[str, Sequence[Cell]]], style: Style, *, label: int = 14) -> list[Line]:
    """Return labelled lines. The parts of a line are separated by dots and wrap beside the label, never under it."""
    lines: list[Line] = []
    dot = spell(Span(" · ", "dim"), style)
    for name, parts in pairs:
        head = spell(Span(f"  {name}", "dim"), style)
        spans: list[Span] = list(pad(head, label))
        started = False
        for part in parts:
            cell = spell(part, style)
            if not cell.text:
                continue
            if started and count_cells(spans) + cells(dot.text) + cells(cell.text) > style.width:
                lines.append(tuple(spans))
                spans, started = [Span(" " * label)], False
            if started:
                spans.append(dot)
            for index, piece in enumerate(_break_at_blanks(cell, style.width - label) if not started else [cell]):
                if index:
                    lines.append(tuple(spans))
                    spans = [Span(" " * label)]
                spans.append(piece)
            started = True
        if started:
            lines.append(tuple(spans))
    return lines


def _break_at_blanks(cell: Span, room: int) -> list[Span]:
    """Return a part that is too long for one line, broken at blanks. A single long word stays whole."""
    pieces: list[str] = []
    for word in split_words(cell.text):
        if pieces and cells(pieces[-1]) + 1 + cells(word) <= room:
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    return [Span(piece, cell.look) for piece in pieces]
