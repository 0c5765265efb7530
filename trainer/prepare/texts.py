"""The unit of every pipeline: a document, as its source gave it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

__all__ = ["Text", "mended", "visible"]


@dataclass(frozen=True)
class Text:
    """A document: its name is unique within its source and says where it lies (`part-3.parquet#1204`).

    Its text can be written as UTF-8: what reads a source sees to that. A very long one comes in several, one after the
    other: what `continues` is the same document as the text before it. Its `url` may come with any of them.
    """

    name: str
    text: str
    url: str = ""
    continues: bool = False


def mended(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which JSON can spell and no UTF-8 has."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def visible(texts: Iterable[Text]) -> Iterator[Text]:
    """Each document, from the first of its texts on that shows a character; one that shows none is left out."""
    begun = False
    for text in texts:
        begun = begun and text.continues
        if begun:
            yield text
        elif text.text and not text.text.isspace():
            begun = True
            yield replace(text, continues=False)
