"""What the output stream can show: width, colour, symbols, redrawing.

A stream without colour gets no escape byte at all: a pipe, or any stream with `TERM=dumb`, `NO_COLOR`, `LC_ALL=C` or
`--color never`. Only `--color always` overrides these, and even then nothing is redrawn without a terminal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

# Every symbol that this package draws. If the encoding lacks one of them, everything is shown in ASCII.
SYMBOLS = "✔✘✗●→·×—–…≥≤≈Δ−█░▁▂▃▄▅▆▇─│┤└○⠁⣿"
_WIDTH_OFF_TERMINAL = 120
_NARROWEST = 40


@dataclass(frozen=True)
class Style:
    """The abilities of the output. `redraw` allows the live view. Without `color` no escape byte is written."""

    width: int = 80
    height: int = 24
    color: bool = False
    unicode: bool = True
    redraw: bool = False


def probe(stream: TextIO, *, color: str = "auto", environment: Mapping[str, str] | None = None) -> Style:
    """Examine a stream and the environment. `COLUMNS` and `LINES` override the terminal's own size.

    `color` is "auto", "always" or "never"; the caller has refused any other value.
    """
    environment = os.environ if environment is None else environment
    on_terminal = _is_terminal(stream)
    dumb = environment.get("TERM", "") in ("dumb", "unknown")
    plain = dumb or bool(environment.get("NO_COLOR")) or _find_locale(environment) in ("C", "POSIX")
    colored = color == "always" or (color == "auto" and on_terminal and not plain)
    width, height = _measure_size(stream, environment, on_terminal)
    return Style(
        width=max(_NARROWEST, width),
        height=height,
        color=colored,
        unicode=_carries_symbols(stream, environment),
        redraw=colored and on_terminal and not dumb,
    )


def _is_terminal(stream: TextIO) -> bool:
    """Return whether the stream is a terminal; False for a closed stream and for one that cannot tell."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _find_locale(environment: Mapping[str, str]) -> str:
    """Return the locale that determines the character set, by POSIX precedence; "" if none is set."""
    return environment.get("LC_ALL") or environment.get("LC_CTYPE") or environment.get("LANG") or ""


def _carries_symbols(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether the symbols can be shown. The locale counts too: Python writes UTF-8 even under `LC_ALL=C`."""
    if _find_locale(environment) in ("C", "POSIX"):
        return False
    try:
        SYMBOLS.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _measure_size(stream: TextIO, environment: Mapping[str, str], on_terminal: bool) -> tuple[int, int]:
    """Return the number of columns and of lines."""
    columns, lines = (_WIDTH_OFF_TERMINAL, 24)
    if on_terminal:
        try:
            columns, lines = os.get_terminal_size(stream.fileno())
        except (OSError, ValueError):
            columns, lines = (80, 24)
    return (
        _parse_small_integer(environment.get("COLUMNS")) or columns or 80,
        _parse_small_integer(environment.get("LINES")) or lines or 24,
    )


def _parse_small_integer(text: str | None) -> int:
    """Return the text as a positive integer of at most five digits; 0 if it is not one."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 6 else 0
