"""What a source names, as the list of its files, each looked at before any work begins."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.core.errors import UsageError
from gpurun.data import hub, parquet
from gpurun.data.documents import Form, SourceFile, look_through
from gpurun.data.kinds import HINTS, recognise
from gpurun.data.refusals import tally, unreadable
from gpurun.data.shard_folder import demand_whole
from gpurun.data.source_names import HUB, STDLIB
from gpurun.data.streams import content_bytes

PIECE_BYTES = 64 << 10
"""Of a large text without marks, what can be held out at once: about 16 thousand tokens."""
_LEAST_PIECE_BYTES = 32
_PIECES_HELD_OUT = 4
"""Into so many pieces what is held out of a text is divided, so that the fraction is met by a quarter."""
_WHOLE_BYTES = 16 << 20
_WHOLE_SHARE = 100
"""A text is one document if it is no larger than this, and no more than one part in so many of its source."""
_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__"}
"""Of the standard library, folders with other people's code, with tests (not installed everywhere) and with tables."""
Known = Mapping[tuple[str, int, int], SourceFile]
"""Files that were looked at by an earlier call, by name, size and time."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """A source: its kind ("stdlib", "file", "folder", "hub"), its files by name, and what else is there, by reason."""

    kind: str
    files: tuple[SourceFile, ...]
    passed_over: Mapping[str, int]

    @property
    def text_bytes(self) -> int:
        """The bytes of text that are expected of it."""
        return sum(file.text_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """The sha256 over names, forms, sizes and times of the files: names a source as it was found."""
        lines = [[file.name, file.form, file.bytes, file.modified_ns, file.weights] for file in self.files]
        return hashlib.sha256(json.dumps(lines).encode("utf-8", "surrogateescape")).hexdigest()


def open_source(
    source: str,
    column: str,
    say: Say,
    *,
    val_fraction: float,
    limit_bytes: int = 0,
    accept_skipped: bool = False,
    known: Known | None = None,
) -> Source:
    """Look at every file of a source: `hf:NAME`, `stdlib`, a file, or a folder of them.

    With a limit, files are taken in an order that depends on their names alone but favours no part of a folder, and of
    the last one its beginning. UsageError for what is missing, empty, damaged or no text; and where more of a folder is
    passed over than read, unless that is accepted.
    """
    kind, root, names, passed = _found(source, say)
    files: list[SourceFile] = []
    passed_bytes, taken = 0, 0
    for name in sorted(names, key=_name_hash) if limit_bytes else names:
        file, reason, size = _look(name, root, kind, column, known or {})
        if file is None:
            passed[reason] += 1
            passed_bytes += size
            continue
        files.append(file)
        taken += file.text_bytes
        if limit_bytes and taken >= limit_bytes:
            files[-1] = _shortened(file, file.text_bytes - (taken - limit_bytes))
            say(f"about {limit_bytes / 1e6:,.1f} MB of the text are taken (data.limit_mb)")
            break
    _demand_text(source, files, passed)
    if passed_bytes > sum(file.bytes for file in files) and kind == "folder" and not accept_skipped:
        raise UsageError(
            "data.mostly_passed_over",
            f"Of {source}, {passed_bytes / 1e6:,.1f} MB are passed over ({tally(passed)}) and "
            f"{sum(file.bytes for file in files) / 1e6:,.1f} MB are read.",
            hint="Name the folder or file that holds the text, or go on with what there is: --accept-skipped.",
        )
    if passed and kind != STDLIB:
        say(f"passed over: {tally(passed)}")
    return Source(kind, tuple(_formed(sorted(files, key=lambda file: file.name), kind, val_fraction)), dict(passed))


def _found(source: str, say: Say) -> tuple[str, Path, list[str], Counter[str]]:
    """(kind, root, names of files below it, passed over) of a source."""
    if source.startswith(HUB):
        return "hub", *hub.files_of(source.removeprefix(HUB), say), Counter()
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        names, passed = _walk(root, _NOT_PROSE)
        return STDLIB, root, [n for n in names if n.endswith(".py") and "_sysconfigdata" not in n], passed
    path = Path(source).expanduser()
    if not path.exists():
        hint = f"Check the path, or use the text that is always there: {STDLIB}."
        raise UsageError("data.missing", f"There is no file or folder {source}.", hint=hint)
    demand_whole(path)
    if path.is_file():
        return "file", path.parent, [path.name], Counter()
    if not path.is_dir():
        what = f"{source} is neither a file nor a folder."
        raise UsageError("data.not_a_file", what, hint="Name a text file, or a folder of some.")
    if (path / "data.json").is_file():
        raise UsageError(
            "data.already_prepared",
            f"{source} holds shards that are prepared already (it has a data.json).",
            hint="Hand that folder over as it is, or name the folder of texts that it was made from.",
        )
    names, passed = _walk(path, set())
    return "folder", path, names, passed


def _walk(root: Path, without: set[str]) -> tuple[list[str], Counter[str]]:
    """Every regular file beneath a folder, by name; hidden ones are left out.

    A link is followed to a file within the folder. A snapshot in the hub's cache is of links into the blobs beside it;
    its Markdown is the cards of a data set, as little its text as where it is named by hf:.
    """
    files, passed = [], Counter[str]()
    real = Path(os.path.realpath(root))
    blobs = [one.with_name("blobs") for one in real.parents if one.name == "snapshots"][:1]
    inside = [real, *(one for one in blobs if one.is_dir())]

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename or root), error)

    for folder, below, names in os.walk(root, onerror=refuse):
        passed["hidden"] += sum(name.startswith(".") for name in (*below, *names))
        below[:] = [name for name in below if name not in without and not name.startswith(".")]
        links = [name for name in below if Path(folder, name).is_symlink()]
        for path in (Path(folder, name) for name in (*links, *names) if not name.startswith(".")):
            if path.is_symlink() and not (path.is_file() and _lies_in(path, inside)):
                passed["links"] += 1
            elif len(inside) == 2 and path.suffix == ".md":
                passed["cards"] += 1
            elif stat.S_ISREG(path.stat().st_mode):
                files.append(path.relative_to(root).as_posix())
            else:
                passed["devices"] += 1
    return sorted(files), +passed


def _lies_in(link: Path, folders: Sequence[Path]) -> bool:
    """Whether what a link leads to lies in one of some folders."""
    return any(map(Path(os.path.realpath(link)).is_relative_to, folders))


def _look(name: str, root: Path, kind: str, column: str, known: Known) -> tuple[SourceFile | None, str, int]:
    """What there is to know of a file; None, why it is passed over, and its size, where it is no text."""
    path = root / name
    try:
        about = path.stat()
        if about.st_size == 0:
            return None, "empty", 0
        found, other = recognise(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if found is None:
        if kind == "file" or other == "git-lfs pointer":
            raise _no_text(path, other)
        return None, other, about.st_size
    before = known.get((name, about.st_size, about.st_mtime_ns))
    if before is not None:
        return replace(before, root=root), "", 0
    if kind == STDLIB and found != "text":
        return None, "no Python", about.st_size
    form: Form
    if found == "parquet":
        form, weights = "parquet", parquet.group_bytes(path, column)
    elif found == "text":
        try:
            size, is_separated = look_through(path)
        except UsageError:
            if kind == STDLIB:  # Python's own library is not the user's to mend.
                return None, "not UTF-8", about.st_size
            raise
        form, weights = "separated" if is_separated and kind != STDLIB else "whole", (size,)
    else:
        form, weights = found, (content_bytes(path),)
    return SourceFile(name, root, form, about.st_size, about.st_mtime_ns, weights), "", 0


def _formed(files: Sequence[SourceFile], kind: str, val_fraction: float) -> Iterator[SourceFile]:
    """The files with their texts cut into pieces where one is a large part of the source, or large in itself."""
    total = sum(file.text_bytes for file in files)
    piece = min(PIECE_BYTES, max(_LEAST_PIECE_BYTES, int(total * val_fraction / _PIECES_HELD_OUT)))
    most = min(_WHOLE_BYTES, total // _WHOLE_SHARE)
    for file in files:
        is_cut = file.form in ("whole", "pieces") and file.text_bytes > most
        yield replace(file, form="pieces", piece_bytes=piece) if is_cut else file


def _shortened(file: SourceFile, most: int) -> SourceFile:
    """A file of which about so many bytes of text are taken; what cannot be divided is taken whole."""
    if file.form == "parquet":
        count = 1
        while sum(file.weights[:count]) < most:
            count += 1
        return replace(file, weights=file.weights[:count])
    if file.form in ("whole", "separated", "lines"):
        return replace(file, form="pieces" if file.form == "whole" else file.form, weights=(most,))
    return file


def _demand_text(source: str, files: Sequence[SourceFile], passed: Mapping[str, int]) -> None:
    if not any(file.text_bytes for file in files):
        raise UsageError(
            "data.empty",
            f"{source} holds no text" + (f" (passed over: {tally(passed)})." if passed else "."),
            hint="Name a file or folder with UTF-8 text, JSON Lines, CSV or Parquet; gzip and zstd are unpacked.",
        )


def _no_text(path: Path, kind: str) -> UsageError:
    hint = HINTS.get(kind, "Name a file of UTF-8 text, JSON Lines, CSV or Parquet.")
    return UsageError("data.no_text", f"{path} is no text: it is {kind}.", hint=hint)


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
