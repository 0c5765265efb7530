"""Lists a source's files, and inspects each file before any work begins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpurun.core.errors import UsageError
from gpurun.data.chosen_files import choose_files, demand_used
from gpurun.data.found_files import find_files
from gpurun.data.layout import Layout
from gpurun.data.look import Known, SourceLook
from gpurun.data.refusals import Say, tally
from gpurun.data.source_file import SourceFile
from gpurun.data.source_names import STDLIB

PIECE_BYTES = 64 << 10
"""The size of the pieces that can be held out of a large text without marks: about 16 thousand tokens."""
_LEAST_PIECE_BYTES = 32
_PIECES_HELD_OUT = 4
"""The least number of pieces in the held-out part of a text, so that the fraction is accurate to a quarter."""
_WHOLE_BYTES = 16 << 20
_WHOLE_SHARE = 100
"""A text remains one document if it has at most _WHOLE_BYTES, and at most 1 / _WHOLE_SHARE of its source's text."""


@dataclass(frozen=True)
class TextSource:
    """A source: its kind ("stdlib", "file", "folder", "archive", "hub"), its files, and skipped files by reason.

    `divided` is a sentence about which files are held out; "" if the texts decide what is held out.
    """

    kind: str
    files: tuple[SourceFile, ...]
    passed_over: Mapping[str, int]
    divided: str = ""

    @property
    def is_divided(self) -> bool:
        """Return whether only whole files are held out."""
        return any(file.held_out for file in self.files)

    @property
    def text_bytes(self) -> int:
        """Return the expected bytes of text."""
        return sum(file.text_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """Return the sha256 over names, forms, sizes and times of the files: it identifies the source in this state."""
        lines = [
            [file.name, file.form, file.bytes, file.modified_ns, file.weights, file.table, file.held_out]
            for file in self.files
        ]
        return hashlib.sha256(json.dumps(lines).encode("utf-8", "surrogateescape")).hexdigest()


def open_source(
    source: str,
    layout: Layout,
    say: Say,
    *,
    val_fraction: float,
    limit_bytes: int = 0,
    accept_skipped: bool = False,
    known: Known | None = None,
) -> TextSource:
    """Inspect every file of a source: `hf:NAME`, `stdlib`, a file, an archive, or a folder of them.

    With a limit, files are used in the order of the hashes of their names, and the last file only in part. UsageError
    for a source that is missing, empty, damaged or not text; for a folder of which more is skipped than read, unless
    that is accepted; and for a layout option that does not apply to any file.
    """
    found = find_files(source, say)
    chosen = choose_files(found, layout, say)
    look = SourceLook(found.kind, layout, known or {})
    files = look.at_files(found.root, chosen.train, limit_bytes)
    _demand_text(source, files, chosen.passed, look)
    if chosen.val:
        apart = look.at_files(chosen.val_root, chosen.val, int(limit_bytes * val_fraction))
        _demand_text(layout.val or source, apart, chosen.passed, look)
        files += [replace(file, held_out=True) for file in apart]
    passed, read_bytes = chosen.passed + look.passed, sum(file.bytes for file in files)
    if limit_bytes and look.is_limited:
        say(f"using about {limit_bytes / 1e6:,.1f} MB of the text (data.limit_mb)")
    if look.passed_bytes > read_bytes and found.kind not in ("file", STDLIB) and not accept_skipped:
        raise UsageError(
            "data.mostly_passed_over",
            f"Of {source}, {look.passed_bytes / 1e6:,.1f} MB would be skipped ({tally(passed)}) and only "
            f"{read_bytes / 1e6:,.1f} MB read.",
            hint=f"Name the folder or file with the text, or accept that: --accept-skipped.{look.hint}",
        )
    demand_used(layout, files)
    if passed and found.kind != STDLIB:
        say(f"skipped: {tally(passed)}")
    if chosen.division:
        say(chosen.division)
    files = list(_cut_large_texts(files, found.kind, val_fraction))
    return TextSource(found.kind, tuple(files), dict(passed), chosen.division)


def _demand_text(source: str, files: Sequence[SourceFile], passed: Mapping[str, int], look: SourceLook) -> None:
    if any(file.text_bytes for file in files):
        return
    if look.refusal is not None:
        raise look.refusal
    passed = {**passed, **look.passed}
    raise UsageError(
        "data.empty",
        f"{source} holds no text" + (f" (skipped: {tally(passed)})." if passed else "."),
        hint="Name a file or folder of UTF-8 text, JSON Lines, CSV or Parquet, packed or not; or a zip or tar of them."
        f"{look.hint}",
    )


def _cut_large_texts(files: Sequence[SourceFile], kind: str, val_fraction: float) -> Iterator[SourceFile]:
    """Yield the files; a text that is large, or a large part of the source, gets the form "pieces"."""
    total = sum(file.text_bytes for file in files)
    piece = min(PIECE_BYTES, max(_LEAST_PIECE_BYTES, int(total * val_fraction / _PIECES_HELD_OUT)))
    most = min(_WHOLE_BYTES, total // _WHOLE_SHARE)
    for file in files:
        is_cut = file.form in ("whole", "pieces") and file.text_bytes > most
        yield replace(file, form="pieces", piece_bytes=piece) if is_cut else file
