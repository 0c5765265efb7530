"""The lines about a folder of shards, and the progress line of `data prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpurun.core.run_plan import DataSummary
from gpurun.core.untrusted import whole
from gpurun.view.number_format import UNKNOWN, format_bytes, format_count, format_duration, format_whole, short_hash
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, line
from gpurun.view.table import Column, table
from gpurun.view.terminal_charts import bar

_BAR_CELLS = 24


@dataclass(frozen=True)
class DataFigures:
    """The content of a folder of shards. `source` is as in its data.json; `shards` counts the shards by split."""

    found: DataSummary
    source: Mapping[str, Any]
    skipped: Mapping[str, int] = field(default_factory=dict)
    shards: Mapping[str, int] = field(default_factory=dict)
    eot: str = ""


def data_lines(name: str, data: DataFigures, style: Style) -> list[Line]:
    """Return the folder's name, then one row for each fact."""
    found = data.found
    rows = [
        ("train", f"{format_whole(found.train_tokens)} tokens{_format_shard_count(data, 'train')}"),
        (
            "held out",
            f"{format_whole(found.val_tokens)} tokens{_format_shard_count(data, 'val')}{_format_val_share(data)}",
        ),
        ("tokeniser", f"{found.tokenizer}, {format_whole(found.vocab_size)} ids, {short_hash(found.tokenizer_sha256)}"),
        ("on disk", format_bytes(found.bytes)),
        ("made of", _describe_source(data.source)),
    ]
    if data.eot:
        places = {"before": "before each document", "after": "after each document", "none": "none"}
        rows.append(("end of text", places.get(data.eot, UNKNOWN)))
    if divided := data.source.get("divided"):
        rows.append(("divided", str(divided)))
    if data.skipped:
        rows.append(("skipped", ", ".join(f"{format_whole(n)} {why}" for why, n in data.skipped.items())))
    cells: list[list[Cell]] = [[Span(key, "dim"), value] for key, value in rows]
    return [line(" ", Span(name, "title")), *table((Column(""), Column("", least=20)), cells, style)[1:]]


def progress_line(figures: Mapping[str, int], *, elapsed_s: float, done_before: int, style: Style) -> Line:
    """Return a progress line: share done, time left at this session's rate, tokens, shards, and that rate."""
    done, total = figures["done_bytes"], max(1, figures["total_bytes"])
    share = min(1.0, done / total)
    full, empty = bar(share, min(_BAR_CELLS, max(8, style.width - 64)))
    fresh = done - done_before
    rate = fresh / elapsed_s if elapsed_s > 0.5 else 0.0
    left = format_duration((total - done) / rate) if rate > 0 else UNKNOWN
    shards = f"{figures['tasks']}/{figures['total_tasks']} shards"
    # The most important part comes first, because a narrow terminal cuts off the end.
    parts = [f"{share:4.0%}", f"{left} left", f"{format_count(figures['tokens'])} tokens", shards]
    parts.append(f"{format_bytes(rate)}/s" if rate > 0 else UNKNOWN)
    return line(" ", Span(full, "accent"), Span(empty, "dim"), " ", "  ".join(parts))


def _format_shard_count(data: DataFigures, split: str) -> str:
    count = data.shards.get(split, 0)
    return f" in {format_whole(count)} {'shard' if count == 1 else 'shards'}" if count else ""


def _format_val_share(data: DataFigures) -> str:
    every = data.found.train_tokens + data.found.val_tokens
    return f" ({100 * data.found.val_tokens / every:.2f} %)" if every else ""


def _describe_source(source: Mapping[str, Any]) -> str:
    parts = [str(source.get("kind", "shards"))]
    if (documents := whole(source.get("documents"))) is not None:
        parts.append(f"{format_whole(documents)} documents")
    if (size := whole(source.get("bytes"))) is not None:
        parts.append(f"{format_bytes(size)} of text")
    if dropped := whole(source.get("dropped")):
        parts.append(f"{format_whole(dropped)} left out")
    return ", ".join(parts)
