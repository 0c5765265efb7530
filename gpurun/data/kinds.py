"""Recognises, from its first bytes, whether a file contains documents in a readable form, or something else.

A file's name is not proof, and training on binary data that is read as text would not cause an error.
"""

from __future__ import annotations

import codecs
import json
import re
import shlex
from itertools import islice
from pathlib import Path
from typing import Literal

from gpurun.core.errors import UsageError
from gpurun.data.archive_members import members_of
from gpurun.data.bounded_rows import members_of_array
from gpurun.data.refusals import refuse_utf16
from gpurun.data.streams import open_content, open_raw

Kind = Literal["text", "lines", "array", "strings", "parquet"]
"""Text, including tables; JSON Lines; one JSON array of objects, or of strings; rows of Parquet."""

HEAD_BYTES = 64 << 10
_NAMED = {
    b"version https://git-lfs.github.com/spec/": "git-lfs pointer",
    b"%PDF-": "PDF",
    b"{\\rtf": "RTF",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "old Office file (doc, xls)",
    b"Rar!\x1a\x07": "rar archive",
    b"7z\xbc\xaf\x27\x1c": "7z archive",
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
_HTML = re.compile(
    rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL
)
_TAG = re.compile(rb"</?[a-z][a-z0-9]*[\s>/]", re.IGNORECASE)
_PANDOC = "Extract its text first (pandoc): pandoc -f {form} -t plain --wrap=none {file} -o {text}"
_OFFICE = 'Extract its text first (LibreOffice): soffice --headless --convert-to "txt:Text (encoded):UTF8" {file}'
_UNPACK = "Unpack it, then name the folder."
_HINTS = {
    "git-lfs pointer": "The file itself is not here; run git lfs pull.",
    "zip archive": _UNPACK,
    "tar archive": _UNPACK,
    "rar archive": _UNPACK,
    "7z archive": _UNPACK,
    "JSON object": "Documents must be one object per line (JSON Lines), or in one array of objects: "
    "jq -c '.KEY[]' {file} > {rows} extracts the rows under one of its keys.",
    "JSON array of arrays": "Choose the member with the text: jq -c '.[] | {{text: .[0]}}' {file} > {rows}",
    "PDF": "Extract its text first (poppler): pdftotext {file} {text}",
    "HTML": _PANDOC.replace("{form}", "html") + "; to train on it with its tags: jq -Rsc '{{text: .}}' {file} > {rows}",
    "RTF": _OFFICE,
    "Word document (docx)": _PANDOC.replace("{form}", "docx"),
    "OpenDocument text (odt)": _PANDOC.replace("{form}", "odt"),
    "EPUB": _PANDOC.replace("{form}", "epub"),
    "old Office file (doc, xls)": _OFFICE,
}
CONVERTED = frozenset(_HINTS) - {"git-lfs pointer", "zip archive", "tar archive"}
"""Kinds that a command can convert to text."""


def hint_for(kind: str, path: Path) -> str:
    """Return a hint for a file of a kind that gpurun cannot read."""
    hint = _HINTS.get(kind, "Name a file of UTF-8 text, JSON Lines, CSV or Parquet.")
    names = {"file": path, "text": path.with_suffix(".txt"), "rows": path.with_suffix(".jsonl")}
    return hint.format(**{key: shlex.quote(str(name)) for key, name in names.items()})


def recognise(path: Path) -> tuple[Kind | None, str]:
    """Return (kind, "") for a file with documents, else (None, what it is); UsageError if unreadable or UTF-16."""
    with open_raw(path) as raw:
        beginning = raw.read(4)
    if beginning == b"PAR1":
        return ("parquet", "") if path.is_file() else (None, "Parquet in an archive")
    if beginning == b"PK\3\4":
        return None, kind_of_zip(path)
    with open_content(path) as stream:
        head = stream.read(HEAD_BYTES)
    refuse_utf16(head, path)
    for magic, name in _NAMED.items():
        if head.startswith(magic):
            return None, name
    if head[257:262] == b"ustar":
        return None, "tar archive"
    if b"\0" in head[:8192]:
        return None, "binary"
    return _guess_kind_of_text(path, head.removeprefix(codecs.BOM_UTF8), is_whole=len(head) < HEAD_BYTES)


def kind_of_zip(path: Path) -> str:
    """Return the name of a zip's format, for example a Word document."""
    try:
        found = members_of(path) if path.is_file() else None
    except UsageError:
        found = None
    names = list(found.members) if found is not None else []
    folders = {name.partition("/")[0] for name in names}
    if "[Content_Types].xml" in names:
        office = {"word": "Word document (docx)", "xl": "Excel workbook (xlsx)", "ppt": "PowerPoint file (pptx)"}
        return next((name for folder, name in office.items() if folder in folders), "zip archive")
    if "META-INF/container.xml" in names:
        return "EPUB"
    if {"content.xml", "META-INF/manifest.xml"} <= {*names}:
        return "OpenDocument text (odt)"
    return "PyTorch file" if any(name.endswith("data.pkl") for name in names) else "zip archive"


def _guess_kind_of_text(path: Path, head: bytes, *, is_whole: bool) -> tuple[Kind | None, str]:
    """Return the kind of a file that looks like text."""
    start = head.lstrip()
    if _HTML.match(head) or (path.suffix.lower() in (".html", ".htm", ".xhtml") and _TAG.search(head)):
        return None, "HTML"
    if start.startswith(b"{"):
        first = start.split(b"\n", 1)[0]
        if _is_object(first) or (len(first) == len(start) and not is_whole):
            return "lines", ""
        return (None, "JSON object") if start[1:].lstrip()[:1] in (b'"', b"}") else ("text", "")
    return _guess_kind_of_array(path, start) if start.startswith(b"[") else ("text", "")


def _guess_kind_of_array(path: Path, start: bytes) -> tuple[Kind | None, str]:
    """Return the kind of a file that begins like an array, from the array's first members."""
    if start[1:].lstrip().startswith(b"{"):
        return "array", ""
    try:
        with open_content(path) as stream:
            members = [type(member) for member in islice(members_of_array(stream, path), 2)]
    except UsageError as error:
        if error.code != "data.bad_line":
            raise
        return "text", ""
    if members and set(members) == {str}:
        return "strings", ""
    return None, "JSON array of arrays" if list in members else "JSON array without text"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8", "replace")), dict)  # Invalid UTF-8 is reported later.
    except (ValueError, RecursionError):
        return False
