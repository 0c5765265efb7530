"""Helpers of test_layouts.py and other tests that read corpora in public layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.data.documents import documents_of
from gpurun.data.layout import parse_layout
from gpurun.data.source_file import Document, FileSpan
from gpurun.data.sources import TextSource, open_source
from tests.refusals import refusal


def opened(path: Path, said: list[str] | None = None, **layout: Any) -> TextSource:
    chosen = parse_layout(**layout)
    return open_source(str(path), chosen, (said if said is not None else []).append, val_fraction=0.1)


def documents(path: Path, **layout: Any) -> list[Document]:
    """Return every document of a source, read as one task."""
    source = opened(path, **layout)
    ends = [len(file.weights) if file.form == "parquet" else file.text_bytes for file in source.files]
    spans = [FileSpan(file, 0, end) for file, end in zip(source.files, ends, strict=True)]
    return list(documents_of(spans, parse_layout(**layout)))


def texts(path: Path, **layout: Any) -> list[str]:
    return [document.text for document in documents(path, **layout)]


def refused(path: Path, code: str, *facts: str, **layout: Any) -> None:
    with refusal(UsageError, code, *facts):
        texts(path, **layout)
