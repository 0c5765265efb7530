"""What a file holds, told by its first bytes: documents in one of the forms that are read, or what it is instead.

A name alone tells nothing: what is not text, and is learned as text, trains without any error.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gpurun.data.refusals import MOST_NAMES, refuse_utf16
from gpurun.data.streams import open_content

Kind = Literal["text", "lines", "array", "table", "parquet"]
"""Text; JSON Lines; one JSON array of objects; CSV or TSV with a head; rows of Parquet."""

HEAD_BYTES = 64 << 10
_NAMED = {
    b"version https://git-lfs.github.com/spec/": "git-lfs pointer",
    b"%PDF-": "PDF",
    b"PK\x03\x04": "zip archive",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"ARROW1": "Arrow file",
    b"\x93NUMPY": "NumPy array",
    b"SQLite format 3\x00": "SQLite database",
    b"\x7fELF": "program",
    b"\x89PNG": "image",
    b"\xff\xd8\xff": "image",
    b"GIF8": "image",
    (20240520).to_bytes(4, "little"): "llm.c shard",
    (20240801).to_bytes(4, "little"): "llm.c shard of uint32 (Llama 3)",
    (20240522).to_bytes(4, "little"): "llm.c evaluation file",
}
HINTS = {
    "git-lfs pointer": "The file itself is not here: git lfs pull.",
    "zip archive": "Unpack it, and name the folder.",
    "tar archive": "Unpack it, and name the folder.",
    "bzip2": "Unpack it: bunzip2 FILE.",
    "xz": "Unpack it: unxz FILE.",
    "JSON object": "Documents stand one object a line (JSON Lines), or in one array of objects.",
    "PDF": "Take its text out first: pdftotext FILE.",
}
"""What to do about a file of these names."""


def recognise(path: Path) -> tuple[Kind | None, str]:
    """The kind of a file's documents, or None and what it is instead. UsageError for what is unreadable, or UTF-16."""
    with open(path, "rb") as raw:
        if raw.read(4) == b"PAR1":
            return "parquet", ""
    with open_content(path) as stream:
        head = stream.read(HEAD_BYTES)
    refuse_utf16(head, path)
    for beginning, name in _NAMED.items():
        if head.startswith(beginning):
            return None, name
    if head[257:262] == b"ustar":
        return None, "tar archive"
    if b"\0" in head[:8192]:
        return None, "binary"
    return _of_text(head.removeprefix(codecs.BOM_UTF8), is_whole=len(head) < HEAD_BYTES)


def _of_text(head: bytes, *, is_whole: bool) -> tuple[Kind | None, str]:
    """The kind of what is text to the eye."""
    start = head.lstrip()
    if start.startswith(b"{"):
        first = start.split(b"\n", 1)[0]
        if _is_object(first) or (len(first) == len(start) and not is_whole):
            return "lines", ""
        return (None, "JSON object") if start[1:].lstrip()[:1] in (b'"', b"}") else ("text", "")
    if start.startswith(b"[") and start[1:].lstrip().startswith(b"{"):
        return "array", ""
    return ("table", "") if delimiter_of(head, is_whole=is_whole) else ("text", "")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def delimiter_of(head: bytes, *, is_whole: bool) -> str:
    r"""The delimiter of a table with a head row, "," or "\t", by its beginning; "" for what is no table.

    A table has at least three rows of as many cells as its head, whose cells are short and different names.
    """
    text = head.decode("utf-8", "replace")
    if not is_whole:  # The last row may be cut.
        text = text[: text.rfind("\n") + 1]
    for delimiter in "\t,":
        if delimiter not in text.split("\n", 1)[0]:
            continue
        try:
            rows = [row for row in csv.reader(text.splitlines(keepends=True), delimiter=delimiter, strict=True) if row]
        except csv.Error:
            rows = []
        rows = rows if is_whole else rows[:-1]
        if len(rows) >= 3 and _is_head(rows[0]) and all(len(row) == len(rows[0]) for row in rows):
            return delimiter
    return ""


def _is_head(cells: Sequence[str]) -> bool:
    named = [cell.strip() for cell in cells]
    is_short = all(0 < len(cell) <= 40 and len(cell.split()) <= 3 for cell in named)
    return 2 <= len(named) <= 10 * MOST_NAMES and is_short and len(set(named)) == len(named)
