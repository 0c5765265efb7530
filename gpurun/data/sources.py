"""What a source names, as the list of its files, each looked at before any work begins."""

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
"""Of a large text without marks, what can be held out at once: about 16 thousand tokens."""
_LEAST_PIECE_BYTES = 32
_PIECES_HELD_OUT = 4
"""Into so many pieces what is held out of a text is divided, so that the fraction is met by a quarter."""
_WHOLE_BYTES = 16 << 20
_WHOLE_SHARE = 100
"""A text is one document if it is no larger than this, and no more than one part in so many of its source."""


@dataclass(frozen=True)
class TextSource:
    """A source: its kind ("stdlib", "file", "folder", "archive", "hub"), its files, and what else is there, by reason.

    `divided` is a sentence about what was divided by names of files; "" where the texts decide what is held out.
    """

    kind: str
    files: tuple[SourceFile, ...]
    passed_over: Mapping[str, int]
    divided: str = ""

    @property
    def is_divided(self) -> bool:
        """Whether whole files are held out, and nothing else."""
        return any(file.held_out for file in self.files)

    @property
    def text_bytes(self) -> int:
        """The bytes of text that are expected of it."""
        return sum(file.text_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """The sha256 over names, forms, sizes and times of the files: names a source as it was found."""
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
    """Look at every file of a source: `hf:NAME`, `stdlib`, a file, an archive, or a folder of them.

    With a limit, files are taken in an order that depends on their names alone but favours no part of a folder, and of
    the last one its beginning. UsageError for what is missing, empty, damaged or no text; where more of a folder is
    passed over than read, unless that is accepted; and for a part of the layout that no file is read by.
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
        say(f"about {limit_bytes / 1e6:,.1f} MB of the text are taken (data.limit_mb)")
    if look.passed_bytes > read_bytes and found.kind not in ("file", STDLIB) and not accept_skipped:
        raise UsageError(
            "data.mostly_passed_over",
            f"Of {source}, {look.passed_bytes / 1e6:,.1f} MB are passed over ({tally(passed)}) and "
            f"{read_bytes / 1e6:,.1f} MB are read.",
            hint="Name the folder or file that holds the text, or go on with what there is: --accept-skipped."
            f"{look.hint}",
        )
    demand_used(layout, files)
    if passed and found.kind != STDLIB:
        say(f"passed over: {tally(passed)}")
    if chosen.says:
        say(chosen.says)
    return TextSource(found.kind, tuple(_formed(files, found.kind, val_fraction)), dict(passed), chosen.says)


def _demand_text(source: str, files: Sequence[SourceFile], passed: Mapping[str, int], look: SourceLook) -> None:
    if any(file.text_bytes for file in files):
        return
    if look.refusal is not None:
        raise look.refusal
    passed = {**passed, **look.passed}
    raise UsageError(
        "data.empty",
        f"{source} holds no text" + (f" (passed over: {tally(passed)})." if passed else "."),
        hint="Name a file or folder with UTF-8 text, JSON Lines, CSV or Parquet, packed or not; a zip or tar of them."
        f"{look.hint}",
    )


def _formed(files: Sequence[SourceFile], kind: str, val_fraction: float) -> Iterator[SourceFile]:
    """The files with their texts cut into pieces where one is a large part of the source, or large in itself."""
    total = sum(file.text_bytes for file in files)
    piece = min(PIECE_BYTES, max(_LEAST_PIECE_BYTES, int(total * val_fraction / _PIECES_HELD_OUT)))
    most = min(_WHOLE_BYTES, total // _WHOLE_SHARE)
    for file in files:
        is_cut = file.form in ("whole", "pieces") and file.text_bytes > most
        yield replace(file, form="pieces", piece_bytes=piece) if is_cut else file
