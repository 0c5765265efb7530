"""An error for users: what happened, what to do, and the code to search for."""

from __future__ import annotations

from gpurun.view.style import Style
from gpurun.view.styled_text import Line, Span, count_cells, hang, line, render, wrap


def error_lines(what: str, hint: str, code: str, style: Style, *, exit_code: int | None = None) -> list[Line]:
    """Return the sentence, the hint below it, and the code at the end of the hint if there is room.

    Further lines of `what` are quoted text. Further lines of `hint` are commands to copy, and are never wrapped.
    """
    tail = line("  ", Span(f"[{code}]" + (f" exit {exit_code}" if exit_code is not None else ""), "dim"))
    advice, *copied = hint.split("\n")
    first, *quoted = what.split("\n")
    lines = [*hang(Span("✗", "bad"), first, style, indent=0), *(line("  ", Span(words, "dim")) for words in quoted)]
    lines += wrap(advice, style, indent=2)
    lines += [line("  ", words) for words in copied]
    if not copied and count_cells(lines[-1]) + count_cells(tail) <= style.width and len(lines) > 1:
        lines[-1] = (*lines[-1], *tail)
    else:
        lines.append(tail)
    return lines


def error_text(what: str, hint: str, code: str, style: Style, *, exit_code: int | None = None) -> str:
    """Return the lines of `error_lines` as text, ready to print to standard error."""
    return render(error_lines(what, hint, code, style, exit_code=exit_code), style)
