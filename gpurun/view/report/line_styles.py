"""How runs are distinguished on the page: by colour, shape and dash, so that no distinction depends on colour alone."""

from __future__ import annotations

from gpurun.view.report.svg_charts import COLORS, SHAPES

_DASHES = ("", ' stroke-dasharray="5 2"', ' stroke-dasharray="1.5 1.5"')
_OUTLINES = {
    "o": '<circle cx="13" cy="7" r="3.4"/>',
    "s": '<rect x="9.8" y="3.8" width="6.4" height="6.4"/>',
    "^": '<path d="M13 3 17 10.4H9Z"/>',
    "D": '<path d="M13 2.4 17.4 7 13 11.6 8.6 7Z"/>',
    "v": '<path d="M13 11 9 3.6H17Z"/>',
    "P": '<path d="M11.6 3.4h2.8v2.2h2.2v2.8h-2.2v2.2h-2.8V8.4H9.4V5.6h2.2Z"/>',
    "X": '<path d="m13 5.2 1.8-1.8 1.8 1.8L14.8 7l1.8 1.8-1.8 1.8L13 8.8l-1.8 1.8-1.8-1.8L11.2 7 9.4 5.2l1.8-1.8Z"/>',
    "h": '<path d="M13 3 16.5 5v4L13 11 9.5 9V5Z"/>',
}


def swatch(place: int) -> str:
    """Return a short piece of the run's line with its marker."""
    color, dash = f"var(--run-{place % COLORS})", _DASHES[place // COLORS % len(_DASHES)]
    line = f'<path d="M0 7H26" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
    marker = f'<g fill="var(--paper)" stroke="{color}" stroke-width="1.6">{_OUTLINES[SHAPES[place % len(SHAPES)]]}</g>'
    return f'<svg class="swatch" viewBox="0 0 26 14" aria-hidden="true">{line}{marker}</svg>'
