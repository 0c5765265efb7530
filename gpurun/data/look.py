"""Inspects each file of a source once, before any work, to find out its form, or why it is skipped."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpurun.core.errors import UsageError
from gpurun.data import parquet
from gpurun.data.kinds import CONVERTED, Kind, hint_for, recognise
from gpurun.data.layout import Layout
from gpurun.data.refusals import unreadable
from gpurun.data.rows import require_columns
from gpurun.data.source_file import Form, SourceFile, Table
from gpurun.data.source_names import STDLIB
from gpurun.data.streams import content_bytes, size_and_time
from gpurun.data.tables import is_called_table, table_of
from gpurun.data.texts import look_through

Known = Mapping[tuple[str, int, int], SourceFile]
"""Files that an earlier call inspected, keyed by name, size and modification time."""


class SourceLook:
    """Inspects a source's files; counts the skipped files by reason, and keeps the first of each kind for a hint."""

    def __init__(self, kind: str, layout: Layout, known: Known) -> None:
        self._kind, self._layout, self._known = kind, layout, known
        self.passed, self.first = Counter[str](), dict[str, Path]()
        self.passed_bytes, self.is_limited = 0, False
        self.refusal: UsageError | None = None
        """The error for the first file of rows that has none of the requested columns."""

    @property
    def hint(self) -> str:
        """Return a sentence about how to convert a skipped file to text; "" if no skipped file can be converted."""
        known = ((reason, path) for reason, path in self.first.items() if reason in CONVERTED)
        return next((f" For {path.name}: {hint_for(reason, path)}" for reason, path in known), "")

    def at_files(self, root: Path, names: Sequence[str], limit_bytes: int) -> list[SourceFile]:
        """Return the files that contain documents; with a limit, a selection by the hashes of their names."""
        files: list[SourceFile] = []
        taken = 0
        for name in _select_names(names, root, limit_bytes) if limit_bytes else names:
            file, reason, size = self._look_at_file(name, root)
            if file is None:
                self.passed[reason] += 1
                self.first.setdefault(reason, root / name)
                self.passed_bytes += size
                continue
            files.append(file)
            taken += file.text_bytes
            if limit_bytes and taken >= limit_bytes:
                files[-1] = _shorten(file, file.text_bytes - (taken - limit_bytes))
                self.is_limited = True
                break
        places = {name: place for place, name in enumerate(names)}
        return sorted(files, key=lambda file: places[file.name])

    def _look_at_file(self, name: str, root: Path) -> tuple[SourceFile | None, str, int]:
        """Return (file, "", 0) for a file with documents, else (None, why it is skipped, its size)."""
        path, kind = root / name, self._kind
        try:
            size, modified_ns = size_and_time(path)
            if size == 0:
                return None, "empty", 0
            found, other = recognise(path)
        except OSError as error:
            raise unreadable(path, error) from None
        is_text = found == "text" or (found in ("lines", "strings") and is_called_table(path))
        if found is None and not (other == "JSON object" and is_called_table(path)):
            if kind == "file" or other == "git-lfs pointer":
                raise UsageError("data.no_text", f"{path} is not text: it is {other}.", hint=hint_for(other, path))
            return None, other, size
        if kind == STDLIB and found != "text":
            return None, "not Python", size
        before = self._known.get((name, size, modified_ns))
        if before is not None:
            return replace(before, root=root, held_out=False), "", 0
        try:
            form, weights, table = self._find_form(path, "text" if is_text or found is None else found)
        except UsageError as error:
            if kind == STDLIB and error.code in ("data.not_utf8", "data.nul_byte"):
                return None, "not UTF-8", size  # The user cannot fix a file of Python's standard library.
            if error.code != "data.no_text_column" or kind == "file" or found == "parquet":
                raise
            self.refusal = self.refusal or error
            what = "JSON" if found in ("lines", "array") and not is_called_table(path) else "table"
            return None, f"{what} without {' and '.join(self._layout.columns)!r}", size
        return SourceFile(name, root, form, size, modified_ns, weights, table=table), "", 0

    def _find_form(self, path: Path, found: Kind) -> tuple[Form, tuple[int, ...], Table | None]:
        """Return a file's form, its bytes of text, and its table format, which is None unless it is a table."""
        layout, is_alone = self._layout, self._kind == "file"
        if found == "parquet":
            return "parquet", parquet.group_bytes(path, layout.columns), None
        if found in ("lines", "array"):
            require_columns(path, found, layout)
            return found, (content_bytes(path),), None
        if found == "strings":
            return found, (content_bytes(path),), None
        table = table_of(path, layout, is_alone=is_alone) if self._kind != STDLIB else None
        if table is not None:
            return "table", (content_bytes(path),), table
        size, is_separated = look_through(path)
        whole: Form = "per_line" if layout.per_line else "whole"
        return "separated" if is_separated and whole == "whole" and self._kind != STDLIB else whole, (size,), None


def _select_names(names: Sequence[str], root: Path, limit_bytes: int) -> list[str]:
    """Return names in the order of their hashes; for an archive the first names, because it is read in order."""
    hashed, sizes = sorted(names, key=_hash_name), 0
    chosen: list[str] = []
    for name in hashed:
        chosen.append(name)
        sizes += size_and_time(root / name)[0]
        if sizes > 2 * limit_bytes:
            break
    is_packed = any(not (root / name).is_file() for name in chosen)
    return sorted(chosen, key={name: place for place, name in enumerate(names)}.__getitem__) if is_packed else hashed


def _shorten(file: SourceFile, most: int) -> SourceFile:
    """Return a file limited to about `most` bytes of text; a file that cannot be divided is returned unchanged."""
    if file.form == "parquet":
        count = 1
        while sum(file.weights[:count]) < most:
            count += 1
        return replace(file, weights=file.weights[:count])
    if file.form in ("whole", "separated", "per_line", "lines"):
        return replace(file, form="pieces" if file.form == "whole" else file.form, weights=(most,))
    return file


def _hash_name(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
