"""A helper of test_documents.py and other tests that reads a file in parts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from gpurun.data.documents import documents_of
from gpurun.data.layout import AS_FOUND, Layout
from gpurun.data.source_file import FileSpan
from gpurun.data.sources import open_source


def in_parts(path: Path, cuts: list[int], layout: Layout = AS_FOUND) -> list[str]:
    """Return the documents of a file that is divided at these byte offsets and read part by part."""
    (file,) = open_source(str(path), layout, lambda _: None, val_fraction=0.1).files
    places = sorted({0, *(cut % file.text_bytes for cut in cuts), file.text_bytes})
    found = []
    for start, stop in pairwise(places):
        found += [document.text for document in documents_of([FileSpan(file, start, stop)], layout)]
    return found
