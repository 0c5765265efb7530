"""Builds the errors that refuse a source; all readers of sources use them."""

from __future__ import annotations

import codecs
import errno
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import errors as trainer_errors
from gpurun.core.untrusted import plain_line

Say = Callable[[str], None]
"""Receives progress messages, one line each."""
MOST_NAMES = 20
"""The most names that a message lists; a vocabulary in JSON has fifty thousand keys."""
MOST_ROW_BYTES = 64 << 20
"""The limit for a row or a text between marks, which is kept in memory; a small file may unpack to any size."""
_NAME_CHARS = 60
_SNIFF_BYTES = 8192
_AROUND_BYTES, _FEW_LETTERS, _FEW_ENCODINGS = 16 << 10, 4, 3
_ENCODINGS = (
    "cp1252", "cp1251", "koi8-r", "koi8-u", "cp866", "cp1250", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257",
    "cp1258", "cp932", "euc-jp", "gb18030", "big5", "cp949", "euc-kr", "cp874", "iso8859-1", "iso8859-2", "iso8859-3",
    "iso8859-4", "iso8859-5", "iso8859-6", "iso8859-7", "iso8859-8", "iso8859-9", "iso8859-10", "iso8859-11",
    "iso8859-12", "iso8859-13", "iso8859-14", "iso8859-15", "iso8859-16",
)  # fmt: skip
"""The likely encodings of a text, by iconv's names; if two decode a text identically, the first is used."""
_CENTRAL_EUROPEAN = {"Polish", "Czech", "Slovak", "Slovene", "Hungarian", "Croatian", "Romanian"}


@contextmanager
def translate_refusals(left: str) -> Iterator[None]:
    """Turn a refusal by the trainer's code into a UsageError, and a failed write into a SetupError.

    `left` is a sentence about what a failed write leaves behind. Failed reads are already UsageErrors.
    """
    try:
        yield
    except trainer_errors.Refused as refused:
        hint = refused.hint or "Prepare the text again for this recipe."
        raise UsageError(refused.code, f"{str(refused)[:1].upper()}{str(refused)[1:]}.", hint=hint) from None
    except OSError as error:
        where = f"{error.filename} " if error.filename else "The data "
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"{where}could not be written: the disk is full. {left}"
            raise SetupError("disk.full", what, hint="Free disk space, or name a folder on another disk.") from None
        what = f"{where}could not be written: {error.strerror or error}. {left}"
        hint = "Check the folder's owner and the state of the disk."
        raise SetupError("disk.write_failed", what, hint=hint) from None


def unreadable(path: Path, error: OSError) -> UsageError:
    """Return the error for a file or folder that the operating system does not allow gpurun to read."""
    what = f"{path} cannot be read: {error.strerror or error}."
    return UsageError("data.unreadable", what, hint="Give yourself read access, or leave it out.")


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Turn an OSError from reading into a UsageError that names the file."""
    try:
        yield
    except OSError as error:
        raise unreadable(Path(error.filename or place), error) from None


def not_utf8(path: Path, raw: bytes, start: int, offset: int) -> UsageError:
    """Return the error for a text with the invalid byte `raw[start]`, at `offset` of the content.

    The hint names an encoding only if the surrounding bytes make it clear, because a wrong encoding would silently
    replace letters.
    """
    found = _guess_encodings(raw[max(0, start - _AROUND_BYTES) : start + _AROUND_BYTES])
    what = f"{path} is not UTF-8: byte 0x{raw[start]:02x} at offset {offset}."
    hint = "Find out which encoding it has, then convert it and check the letters: "
    if found:
        shown = " or ".join(f"{name.upper()}{f' ({word})' if word else ''}" for name, word in found.items())
        what, hint = f"{what[:-1]}; it is probably {shown}.", "Convert it first and check the letters: "
    hint += _format_conversion(next(iter(found), "ENCODING"), path, path.suffix or ".txt")
    return UsageError("data.not_utf8", what, hint=hint)


def _guess_encodings(raw: bytes) -> dict[str, str]:
    """Return the possible encodings of a text, by iconv's names, the most likely first; {} if the evidence is unclear.

    Each comes with a word of the text that the other encodings would decode differently.
    """
    from charset_normalizer import from_bytes

    if sum(byte > 127 for byte in raw) < _FEW_LETTERS:
        return {}
    matches = list(from_bytes(raw))
    alike = [
        candidate
        for candidate in matches
        if (candidate.chaos, candidate.coherence) == (matches[0].chaos, matches[0].coherence)
    ]
    order = ("cp1250", *_ENCODINGS) if alike and alike[0].language in _CENTRAL_EUROPEAN else _ENCODINGS
    names: dict[str, str] = {}
    for match in alike:
        same = {name.replace("_", "-") for name in (match.encoding, *match.could_be_from_charset)}
        if name := next((name for name in order if name in same), ""):
            names.setdefault(str(match), name)
    places = [at for at, signs in enumerate(zip(*names, strict=False)) if len({*signs}) > 1][:1]
    words = {
        name: plain_line("".join(re.findall(r"\S*$", text[:at]) + re.findall(r"^\S*", text[at:])), 30)
        for text, name in names.items()
        for at in places
    }
    return {name: words.get(name, "") for name in sorted(names.values(), key=order.index)[:_FEW_ENCODINGS]}


def has_nul(path: Path, offset: int) -> UsageError:
    """Return the error for a text with a NUL byte: either a crash damaged the file, or it is not a text."""
    hint = f"Check that place. To remove the bytes: tr -d '\\0' < {shlex.quote(path.name)} > OTHER.txt"
    return UsageError("data.nul_byte", f"{path} has a NUL byte at offset {offset:,}.", hint=hint)


def refuse_utf16(head: bytes, path: Path) -> None:
    """Raise UsageError for UTF-16 text ("Unicode" on Windows); its zero bytes would look like binary data."""
    head = head[: _SNIFF_BYTES // 2 * 2]
    marked = "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
    for encoding in (marked,) if marked else ("utf-16-le", "utf-16-be"):
        try:
            beginning = codecs.getincrementaldecoder(encoding)().decode(head)
        except UnicodeDecodeError:
            continue
        printable = all(char.isprintable() or char in "\t\n\r\f" for char in beginning)
        # Without a byte-order mark, spaces and line ends show that it is text and how its bytes are paired.
        if printable and (marked or any(char in " \n" for char in beginning)):
            hint = f"Convert it first: {_format_conversion(encoding.replace('16-', '16'), path, path.suffix)}"
            raise UsageError("data.not_utf8", f"{path} is {encoding.upper()}, not UTF-8.", hint=hint)


def no_column(path: Path, column: str, there: Sequence[str], kind: str = "column") -> UsageError:
    """Return the error for rows without the requested column; it lists the columns that they have."""
    hint = "Name the column with the documents: gpurun data prepare RECIPE --text-column NAME, or several in "
    hint += "--template '{a} {b}'; leave out files of other kinds with --exclude GLOB."
    if kind == "column":
        hint += " If the first row of a table is a document, add --no-header; for a text, --delimiter none."
    what = f"{path} has no text in a {kind} {column!r}; it has: {name_list([name or '(empty)' for name in there])}."
    return UsageError("data.no_text_column", what, hint=hint)


def bad_row(path: Path, where: str, what: str) -> UsageError:
    """Return the error for an invalid row."""
    hint = "Every row must have the text of a document; fix that row or remove it."
    return UsageError("data.bad_line", f"{path}, {where}: {what}.", hint=hint)


def too_long(path: Path, where: str) -> UsageError:
    """Return the error for a row, or a text between two marks, that is too long to keep in memory."""
    what = f"{path}, {where}: it has more than {MOST_ROW_BYTES >> 20} MB, the limit for one row."
    return UsageError("data.row_too_long", what, hint="Split that text into several rows, or remove it.")


def name_list(names: Sequence[str]) -> str:
    """Return names as a list for a message; only the first few names, and only the beginning of a long name."""
    shortened = [name if len(name) <= _NAME_CHARS else f"{name[:_NAME_CHARS]}…" for name in names[:MOST_NAMES]]
    return ", ".join([*shortened, *(["…"] if len(names) > MOST_NAMES else [])]) or "none"


def tally(counts: Mapping[str, int]) -> str:
    """Return the counts of skipped files by reason, such as "2 binary, 1 hidden"; "" if there are none."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def _format_conversion(encoding: str, path: Path, suffix: str) -> str:
    """Return the conversion command, quoted for a shell."""
    names = [shlex.quote(name) for name in (path.name, f"{path.stem}-utf8{suffix}")]
    return f"iconv -f {encoding} -t utf-8 {names[0]} > {names[1]}"
