"""Lines of styled text: measured in cells, clipped, wrapped, and rendered for a terminal.

A screen is a list of `Line`s, and a line is a tuple of `Span`s. A style is a name, so that meaning and colour are
separate and no meaning depends on colour alone. Only `render` makes text for a terminal, and it passes every span
through `harmless`, wherever the span was made.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpurun.core.untrusted import harmless
from gpurun.view.style import Style

LOOKS = {
    "title": "1",
    "dim": "2",
    "good": "32",
    "warn": "33",
    "bad": "1;31",
    "accent": "36",
    "money": "1",
}

_ASCII = {
    "✔": "ok", "✘": "X", "✗": "x", "●": "*", "○": "o", "→": "->", "·": "-", "×": "x", "—": "-", "–": "-", "−": "-",
    "…": "...", "≥": ">=", "≤": "<=", "≈": "~", "Δ": "diff", "█": "#", "░": ".", "─": "-", "│": "|", "┤": "+",
    "└": "+", "“": '"', "”": '"', "‘": "'", "’": "'", "°": "", "μ": "u",
}  # fmt: skip
# Do not break a line between a figure and its unit, within a figure, or before a duration.
_GLUED = re.compile(r"(?<=\d) (?=\d|(?:[dhms%]|[kMGTP]?B|[kMT])(?!\w))|(?<=[a-z]) (?=\d+ [hms](?!\w))")
_TO_ASCII = str.maketrans(_ASCII)


@dataclass(frozen=True, slots=True)
class Span:
    """Text in one style. The empty style means plain text."""

    text: str
    look: str = ""


Line = tuple[Span, ...]
Cell = str | Span


def line(*parts: Cell) -> Line:
    """Return a line of spans and plain strings."""
    return tuple(part if isinstance(part, Span) else Span(part) for part in parts)


def to_ascii(text: str) -> str:
    """Return the text in ASCII: gpurun's symbols as ASCII text, every other character as a question mark."""
    return text if text.isascii() else text.translate(_TO_ASCII).encode("ascii", "replace").decode("ascii")


def spell(cell: Cell, style: Style) -> Span:
    """Return a cell in the form in which the terminal will show it, so that its width can be measured."""
    span = cell if isinstance(cell, Span) else Span(cell)
    text = harmless(span.text)
    text = text if style.unicode else to_ascii(text)
    return span if text == span.text else Span(text, span.look)


def cells(text: str) -> int:
    """Return how many terminal cells a text needs: wide characters two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(_cells_of(character) for character in text)


@lru_cache(4096)
def _cells_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def count_cells(spans: Iterable[Span]) -> int:
    """Return how many terminal cells a line needs."""
    return sum(cells(span.text) for span in spans)


def clip(text: str, width: int, ellipsis: str = "…") -> str:
    """Return at most `width` cells of a text. A text that was cut ends in an ellipsis if there is room for it."""
    if cells(text) <= width:
        return text
    room = width - cells(ellipsis)
    if room < 1:
        ellipsis, room = "", max(0, width)
    kept, used = [], 0
    for character in text:
        used += _cells_of(character)
        if used > room:
            break
        kept.append(character)
    return "".join(kept).rstrip() + ellipsis


def clip_line(spans: Line, width: int, style: Style) -> Line:
    """Return a line cut to a width, with its styles."""
    spelled = tuple(spell(span, style) for span in spans)
    if count_cells(spelled) <= width:
        return spelled
    kept: list[Span] = []
    for span in spelled:
        room = width - count_cells(kept)
        if room <= 0:
            break
        kept.append(Span(clip(span.text, room, "…" if style.unicode else "..."), span.look))
    return tuple(kept)


def pad(span: Span, width: int, *, right: bool = False) -> Line:
    """Return a span padded with blanks to a width, after it or, if `right`, before it."""
    blanks = Span(" " * max(0, width - cells(span.text)))
    return (blanks, span) if right else (span, blanks)


def spread(left: Line, right: Line, style: Style) -> Line:
    """Return the left and right parts at the two edges. If both do not fit, the left part is clipped."""
    end = tuple(spell(span, style) for span in right)
    start = clip_line(left, style.width - count_cells(end) - 2, style)
    return (*start, Span(" " * (style.width - count_cells(start) - count_cells(end))), *end)


def flow(parts: Sequence[Line], style: Style, *, gap: str = "  ", indent: int = 0, first: Line = ()) -> list[Line]:
    """Join parts into lines, with breaks only between parts. `first` comes before them, within the indent."""
    space = spell(Span(gap, "dim"), style)
    head = tuple(spell(span, style) for span in first)
    current: list[Span] = [*head, Span(" " * max(0, indent - count_cells(head)))]
    done: list[Line] = []
    started = False
    for part in parts:
        spelled = tuple(spell(span, style) for span in part)
        needed = count_cells(current) + (cells(space.text) if started else 0) + count_cells(spelled)
        if started and needed > style.width:
            done.append(tuple(current))
            current, started = [Span(" " * indent)], False
        if started:
            current.append(space)
        current.extend(clip_line(spelled, style.width - count_cells(current), style))
        started = True
    return [*done, tuple(current)] if started or head else done


def split_words(text: str) -> list[str]:
    """Split a text into parts that must not be broken: words, and figures with units (`3 h`, `4 768`, `2.5 B`)."""
    return [word.replace("\xa0", " ") for word in _GLUED.sub("\xa0", text).split(" ") if word]


def wrap(text: str, style: Style, *, indent: int = 0, look: str = "") -> list[Line]:
    """Wrap a text at blanks. A longer single word (a path, a command) stays whole, so that it can be copied."""
    lines: list[Line] = []
    room = max(20, style.width - indent)
    current = ""
    for word in split_words(spell(text, style).text):
        if current and cells(current) + 1 + cells(word) > room:
            lines.append(line(" " * indent, Span(current, look)))
            current = word
        else:
            current = f"{current} {word}" if current else word
    return [*lines, line(" " * indent, Span(current, look))] if current else lines


def fold(text: str, style: Style, *, indent: int = 0, look: str = "") -> list[Line]:
    """Quote a line unchanged, including blanks, folded at the terminal's edge, after a blank if there is one nearby."""
    room = max(20, style.width - indent)
    rows = [""]
    for character in spell(text, style).text:
        if cells(rows[-1]) + _cells_of(character) > room:
            kept = rows[-1].rfind(" ") + 1
            kept = kept if kept > len(rows[-1]) // 2 else len(rows[-1])
            rows[-1:] = [rows[-1][:kept], rows[-1][kept:]]
        rows[-1] += character
    return [line(" " * indent, Span(row, look)) for row in rows]


def hang(mark: Span, text: str, style: Style, *, indent: int = 2, look: str = "") -> list[Line]:
    """Return a mark with a text that wraps beside it, never under it."""
    shown = spell(mark, style)
    beside = indent + cells(shown.text) + 1
    first, *rest = wrap(text, style, indent=beside, look=look) or [line("")]
    return [(Span(" " * indent), shown, Span(" "), *first[1:]), *rest]


def render(lines: Iterable[Line], style: Style) -> str:
    """Return the text to print: lines separated by newlines, without trailing blanks and without a final newline."""
    return "\n".join(_render_line(spans, style) for spans in lines)


def _render_line(spans: Line, style: Style) -> str:
    spelled = [spell(span, style) for span in spans]
    while spelled and not spelled[-1].text.rstrip():
        spelled.pop()
    if spelled:
        spelled[-1] = Span(spelled[-1].text.rstrip(), spelled[-1].look)
    if not style.color:
        return "".join(span.text for span in spelled)
    return "".join(
        f"\x1b[{LOOKS[span.look]}m{span.text}\x1b[0m" if span.look and span.text else span.text for span in spelled
    )
