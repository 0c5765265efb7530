"""The price list: what can be rented, and which machines end themselves."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from gpurun.core.money import format_usd
from gpurun.core.records import Offer
from gpurun.providers.slurm.jobs import Partition
from gpurun.view.candidate_table import guard_words
from gpurun.view.number_format import format_duration
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, hang, line, wrap
from gpurun.view.table import Column, table

_COLUMNS = (
    Column("PROVIDER"),
    Column("GPU"),
    Column("TYPE", least=14, leaves=4),
    Column("WHERE", least=8, leaves=3),
    Column("$/h", right=True),
    Column("BOOT", right=True, leaves=5),
    Column("DIES BY ITSELF", leaves=2),
    Column("PRICE", leaves=6),
)


def offers_screen(offers: Sequence[Offer], notes: Sequence[str], warnings: Sequence[str], style: Style) -> list[Line]:
    """Return the offers in the given order, then warnings and notes about them."""
    lines = table(_COLUMNS, [_cells(offer) for offer in offers], style) if offers else []
    if offers and (notes or warnings):
        lines.append(line())
    for warning in warnings:
        lines += hang(Span("!", "warn"), warning, style)
    for note in notes:
        lines += wrap(note, style, indent=4 if warnings else 2, look="dim")
    return lines


def partitions_table(partitions: Sequence[Partition], style: Style) -> list[Line]:
    """Return the partitions of a cluster in the given order: nodes that work, idle nodes, GPUs, and the longest job."""
    columns = (
        Column("PARTITION"),
        Column("STATE"),
        Column("NODES", right=True),
        Column("IDLE", right=True),
        Column("GPUS A NODE", right=True),
        Column("LONGEST JOB", right=True),
    )
    rows: list[list[Cell]] = [
        [
            Span(part.name + (" (default)" if part.is_default else ""), "title" if part.is_up else "dim"),
            Span("up" if part.is_up else "down", "good" if part.is_up else "bad"),
            f"{part.nodes_with(0)}",
            Span(f"{part.idle}", "good" if part.idle else ""),
            f"{part.most_gpus}",
            "no limit" if part.longest_s == inf else format_duration(part.longest_s),
        ]
        for part in partitions
    ]
    return table(columns, rows, style)


def _cells(offer: Offer) -> list[Cell]:
    return [
        Span(offer.provider, "title"),
        offer.label,
        Span(offer.type_id, "dim"),
        offer.place,
        Span(format_usd(offer.rate_micros_per_hour).removeprefix("$"), "money"),
        f"~{-(-offer.boot_s // 60)} m",
        guard_words(offer),
        Span(_source(offer), "dim"),
    ]


def _source(offer: Offer) -> str:
    """Return whether a price is live or from the catalogue. A note below the table has the catalogue's date."""
    return "catalogue" if offer.price_source.startswith("catalogue") else "live"
