"""The sentences in which a source is refused, wherever it is met."""

from __future__ import annotations

import codecs
import errno
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import errors as trainer_errors

MOST_NAMES = 20
"""Of what a file has, a sentence tells so many: a vocabulary in JSON has fifty thousand keys."""
MOST_ROW_BYTES = 64 << 20
"""Of a row, and of a text between marks, which are in memory whole; a file may be made to unpack to any size."""
_NAME_CHARS = 60
_SNIFF_BYTES = 8192


@contextmanager
def preparing(left: str) -> Iterator[None]:
    """Within it a refusal of the trainer's is a UsageError, and what cannot be written a SetupError.

    `left` says what a failed write leaves behind. What reading raises is a UsageError already.
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
            raise SetupError("disk.full", what, hint="Free some space, or name a folder on another disk.") from None
        what = f"{where}could not be written: {error.strerror or error}. {left}"
        hint = "Check that the folder is yours and the disk is sound."
        raise SetupError("disk.write_failed", what, hint=hint) from None


def unreadable(path: Path, error: OSError) -> UsageError:
    """A file or folder that the operating system does not let us read."""
    what = f"{path} cannot be read: {error.strerror or error}."
    return UsageError("data.unreadable", what, hint="Give yourself read access, or leave it out.")


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Within it what the operating system does not let us read is a UsageError that names it."""
    try:
        yield
    except OSError as error:
        raise unreadable(Path(error.filename or place), error) from None


def not_utf8(path: Path, byte: int, offset: int) -> UsageError:
    """A text with a byte that UTF-8 has not there."""
    hint = f"Convert it first, for instance: {_conversion('latin1', path, '.txt')}"
    return UsageError("data.not_utf8", f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset}.", hint=hint)


def has_nul(path: Path, offset: int) -> UsageError:
    """A text with a NUL byte, which no text has: a file that was cut by a crash, or another kind of file."""
    hint = f"Look at that place; to drop the bytes: tr -d '\\0' < {shlex.quote(path.name)} > OTHER.txt"
    return UsageError("data.nul_byte", f"{path} has a NUL byte at offset {offset:,}.", hint=hint)


def refuse_utf16(head: bytes, path: Path) -> None:
    """Refuse a text that begins as Windows writes "Unicode"; its zeros would pass for those of a binary file."""
    if not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return
    beginning = head[:_SNIFF_BYTES].decode("utf-16", "ignore")
    if all(one.isprintable() or one.isspace() for one in beginning):
        hint = f"Convert it first: {_conversion('utf-16', path, path.suffix)}"
        raise UsageError("data.not_utf8", f"{path} is UTF-16, not UTF-8.", hint=hint)


def no_column(path: Path, column: str, there: Sequence[str], kind: str = "column") -> UsageError:
    """Rows without a text under the column that is asked for, and the names that they have."""
    return UsageError(
        "data.no_text_column",
        f"{path} has no text in a {kind} {column!r}; there are: {listed(there)}.",
        hint="Name the one that holds the documents: gpurun data prepare RECIPE --text-column NAME.",
    )


def bad_row(path: Path, where: str, what: str) -> UsageError:
    """A row that is none."""
    hint = "Every row has the text of a document; mend that one or take it out."
    return UsageError("data.bad_line", f"{path}, {where}: {what}.", hint=hint)


def too_long(path: Path, where: str) -> UsageError:
    """A row, or a text between two marks, that would be held in memory whole."""
    what = f"{path}, {where}: it has more than {MOST_ROW_BYTES >> 20} MB, which is the most that one row may have."
    return UsageError("data.row_too_long", what, hint="Cut that text into several rows, or take it out.")


def listed(names: Sequence[str]) -> str:
    """Names for a sentence: the first of very many, and of a very long one its beginning."""
    told = [name if len(name) <= _NAME_CHARS else f"{name[:_NAME_CHARS]}…" for name in names[:MOST_NAMES]]
    return ", ".join([*told, *(["…"] if len(names) > MOST_NAMES else [])]) or "none"


def tally(counts: Mapping[str, int]) -> str:
    """What was passed over, by reason: "2 binary, 1 hidden"; "" for nothing."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def _conversion(encoding: str, path: Path, suffix: str) -> str:
    """The command, as a shell takes it: a name may have a space, or something worse."""
    names = [shlex.quote(name) for name in (path.name, f"{path.stem}-utf8{suffix}")]
    return f"iconv -f {encoding} -t utf-8 {names[0]} > {names[1]}"
