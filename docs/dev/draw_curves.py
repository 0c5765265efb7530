"""Extracts the chart of losses from a report as a picture: draw_curves.py report.html > curves.svg.

The page comes from `gpurun report RUN... --html report.html`, so that the picture shows what the report shows.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

WIDTH, HEIGHT, LINE = 662.4, 309.6, 20
COLORS = "--quiet:#57606a;--rule:#d0d7de;--paper:#ffffff;"
ON_DARK = "--quiet:#9aa4af;--rule:#30363d;--paper:#0d1117;"
RUNS = re.compile(r"--run-\d:#[0-9a-f]{6}")
LEGEND = re.compile(r'<li><svg class="swatch"[^>]*>(.*?)</svg>([^<]*)</li>')


def main(page: str) -> str:
    """Return the report's first chart, with the names of its runs below it; light or dark like the reader's screen."""
    chart = re.search(r'<div class="broad"><svg [^>]*>(.*?)</svg></div>', page, re.DOTALL)
    legend = page[page.index('<ul class="legend">') : page.index("</ul>", page.index('<ul class="legend">'))]
    if chart is None:
        sys.exit("That page has no chart of losses: it is not a gpurun report.")
    names, palette = LEGEND.findall(legend), RUNS.findall(page)
    light, dark = ";".join(palette[:8]), ";".join(palette[8:16])
    keys = "".join(
        f'<g transform="translate({60 + 150 * place} {HEIGHT + 4})">{line}'
        f'<text x="34" y="12" font-size="12" fill="var(--quiet)">{name}</text></g>'
        for place, (line, name) in enumerate(names)
    )
    style = f"svg{{{COLORS}{light}}}@media(prefers-color-scheme:dark){{svg{{{ON_DARK}{dark}}}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + LINE}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="Loss against optimiser steps">\n'
        f"<style>{style}</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT + LINE}" fill="var(--paper)"/>\n{chart[1].strip()}\n{keys}\n</svg>'
    )


if __name__ == "__main__":
    print(main(Path(sys.argv[1]).read_text(encoding="utf-8")))
