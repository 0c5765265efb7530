"""The unit of every pipeline: a document, as its source gave it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Text"]


@dataclass(frozen=True)
class Text:
    """A document: its name is unique within its source and says where it lies (`part-3.parquet#1204`).

    A very long one comes in several, one after the other: what `continues` is the same document as the text before it.
    """

    name: str
    text: str
    url: str = ""
    continues: bool = False
