"""The terms of a mandate, for the user who writes or reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.money import format_rate, format_usd
from gpurun.view.number_format import short_hash
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, line
from gpurun.view.table import fields


def mandate_lines(terms: Mapping[str, Any], style: Style, *, now: float, revoked: bool = False) -> list[Line]:
    """Return what a mandate permits. If `terms` is empty, return a warning that the mandate's file is not valid."""
    if not terms:
        return [
            line("  ", Span("It was edited, or its file cannot be read: no run starts under it.", "warn")),
            line(),
        ]
    rate, until_wall = terms["rate_max_micros_per_hour"], terms["until_wall"]
    over = "revoked" if revoked else "over since" if now >= until_wall else "until"
    rows: list[tuple[str, Sequence[Cell]]] = [
        ("All runs", [f"{format_usd(terms['total_micros'])} at most"]),
        ("Each run", [f"{format_usd(terms['per_run_micros'])} at most"]),
        ("An hour", [f"{format_rate(rate)} at most" if rate is not None else "any price"]),
        ("Providers", [", ".join(terms["providers"]) or "every cloud that has a key"]),
        ("Cards", [", ".join(terms["cards"]) or "every card"]),
        ("Spot machines", ["yes" if terms["spot"] else "no"]),
        ("Holds", [over if revoked else f"{over} {utc(until_wall)[:16]}Z"]),
        ("Uploads from", [terms["root"]]),
        ("Your secrets", [Span(name, "warn") for name in terms["secrets"]]),
        ("Images", list(terms["images"])),
        ("Scripts", [f"sha256 {short_hash(digest)}" for digest in terms["setups"]]),
    ]
    return [line(), *fields(rows, style, label=16), line()]
