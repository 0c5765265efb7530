"""A source as the list of its files, each looked at before any work begins: what is wrong at once is said at once."""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainer.prepare.corpus import why_no_text
from trainer.prepare.errors import Refusal, refuse_utf16, unreadable
from trainer.prepare.listing import STDLIB, files_of, tally
from trainer.prepare.sources import hub, parquet
from trainer.prepare.sources.files import Form, SourceFile
from trainer.prepare.sources.plain import WHOLE_BYTES, look_through
from trainer.prepare.sources.streams import content_bytes, is_packed, open_content

__all__ = ["HUB", "Known", "Source", "open_source"]

HUB = "hf:"
_SNIFF_BYTES = 64 << 10
_LONG_LOOK_BYTES = 1 << 30
_LINES = (".jsonl", ".ndjson", ".json")
_ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*\{")

Known = Mapping[tuple[str, int, int], tuple[bool, tuple[int, ...]]]
"""What is known already of files: whether they have separators, and their weights, by name, size and time."""


@dataclass(frozen=True)
class Source:
    """A source: its kind, its files in the order of their names, and why others of a folder are passed over."""

    kind: str
    files: tuple[SourceFile, ...]
    skipped: Mapping[str, int]

    @property
    def text_bytes(self) -> int:
        """The bytes of text that are expected of it."""
        return sum(file.text_bytes for file in self.files)


def open_source(source: str, column: str, say: Callable[[str], None], known: Known | None = None) -> Source:
    """Look at every file of a source: `hf:NAME`, `stdlib`, a file, or a folder of them.

    Parquet (`.parquet`) and JSON Lines (`.jsonl`, perhaps `.gz` or `.zst`) hold a document a row; every other file is
    text, read once for its separators. Packed files are unpacked once, for their length; what is `known` is not looked
    at again. Raises Refusal.
    """
    kind, root, names, skipped = _found(source, say)
    files = [file for name in names if (file := _look(name, root, kind, column, known or {}, skipped, say))]
    if not any(file.text_bytes for file in files):
        raise Refusal(
            "data.empty",
            f"{source} holds no text" + (f" (skipped: {tally(skipped)})." if skipped else "."),
            hint="Name a file or folder with UTF-8 text, JSON Lines or Parquet; packed ones are read as .gz and .zst.",
        )
    return Source(kind, tuple(files), skipped)


def _found(source: str, say: Callable[[str], None]) -> tuple[str, Path, list[str], dict[str, int]]:
    """(kind, root, names below it, skipped) of a source."""
    if source.startswith(HUB):
        return "hub", *hub.files_of(source.removeprefix(HUB), say), {}
    return files_of(source)


def _look(
    name: str,
    root: Path,
    kind: str,
    column: str,
    known: Known,
    skipped: dict[str, int],
    say: Callable[[str], None],
) -> SourceFile | None:
    """What there is to know of a file; None where it is passed over, which is counted."""
    path = root / name
    try:
        about = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    if about.st_size == 0:
        skipped["empty"] = skipped.get("empty", 0) + 1
        return None
    form, reason = _form(path, kind, column)
    if reason:
        skipped[reason] = skipped.get(reason, 0) + 1
        return None
    key = name, about.st_size, about.st_mtime_ns
    separated, weights = known[key] if key in known else _measured(name, path, form, column, say)
    if form == "whole":
        form = "separated" if separated else "blocks" if kind == "file" or weights[0] > WHOLE_BYTES else "whole"
    return SourceFile(name, root, form, about.st_size, about.st_mtime_ns, weights)


def _measured(
    name: str, path: Path, form: Form, column: str, say: Callable[[str], None]
) -> tuple[bool, tuple[int, ...]]:
    """Whether a text has separator lines, and a file's weights; what may take a while is said before."""
    if form == "parquet":
        return False, parquet.group_bytes(path, column)
    if is_packed(path) and path.stat().st_size > WHOLE_BYTES:
        say(f"unpacking {name} once, for its length")
    elif form == "whole" and path.stat().st_size > _LONG_LOOK_BYTES:
        say(f"looking through {name} once, for separators")
    if form == "lines":
        return False, (content_bytes(path),)
    size, separated = look_through(path)
    return separated, (size,)


def _form(path: Path, kind: str, column: str) -> tuple[Form, str]:
    """How a file holds its documents by name and beginning, and why it is passed over ("": it is not)."""
    name = PurePosixPath(path.name.lower())
    if name.suffix == ".parquet":
        return "parquet", ""
    with open_content(path) as stream:
        head = stream.read(_SNIFF_BYTES if kind != STDLIB else -1)
    if kind != STDLIB:
        refuse_utf16(head, path)
    head = head.removeprefix(codecs.BOM_UTF8)
    suffix = PurePosixPath(name.stem).suffix if is_packed(path) else name.suffix
    if suffix in _LINES and (suffix != ".json" or head.lstrip()[:1] == b"{"):
        return "lines", ""
    if suffix == ".json":
        _refuse_array(head, path, column)
    # What is not UTF-8 is a refusal with its place when it is read, except in Python's own library, which is not ours.
    reason = why_no_text(head, path, cut=False, strict=False) if kind == STDLIB else "binary" * (b"\0" in head[:8192])
    return "whole", reason


def _refuse_array(head: bytes, path: Path, column: str) -> None:
    """Refuse documents in one JSON array: as plain text, a model would learn the brackets and keys around them."""
    if _ARRAY_OF_OBJECTS.match(head) and json.dumps(column).encode() in head:
        what = f"{path} is one JSON array, of which no part can be read before its end."
        program = {".gz": "gzip -dc", ".zst": "zstd -dc"}.get(path.suffix.lower(), "cat")
        names = [shlex.quote(name) for name in (path.name, f"{path.name.split('.')[0]}.jsonl")]
        hint = f"Make it JSON Lines first: {program} {names[0]} | jq -c '.[]' > {names[1]}"
        raise Refusal("data.json_array", what, hint=hint)
