"""The one way in which preparing ends badly: a refusal that says what is wrong and what to do about it."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_NAMES = 20
"""Of what a file has, a sentence tells so many: a vocabulary in JSON has fifty thousand keys."""
_NAME_CHARS = 60
_SNIFF_BYTES = 8192


class Refusal(Exception):
    """What was asked for cannot be prepared; nothing was left behind."""

    def __init__(self, code: str, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint

    def __reduce__(self) -> tuple[Any, ...]:
        """A refusal in a worker reaches the process that it works for."""
        return _again, (self.code, self.message, self.hint)

    def as_record(self) -> dict[str, str]:
        """The refusal as it is printed."""
        return {"code": self.code, "message": self.message, "hint": self.hint}


def _again(code: str, message: str, hint: str) -> Refusal:
    return Refusal(code, message, hint=hint)


def unreadable(path: Path, error: OSError) -> Refusal:
    """A file or folder that the operating system does not let us read."""
    what = f"{path} cannot be read: {error.strerror or error}."
    return Refusal("data.unreadable", what, hint="Give yourself read access, or leave it out.")


def not_utf8(path: Path, byte: int, offset: int) -> Refusal:
    """A text with a byte that UTF-8 has not there."""
    return Refusal(
        "data.not_utf8",
        f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset}.",
        hint=f"Convert it first, for instance: {_conversion('latin1', path, '.txt')}",
    )


def _conversion(encoding: str, path: Path, suffix: str) -> str:
    """The command, as a shell takes it: a name may have a space, or something worse."""
    names = [shlex.quote(name) for name in (path.name, f"{path.stem}-utf8{suffix}")]
    return f"iconv -f {encoding} -t utf-8 {names[0]} > {names[1]}"


def refuse_utf16(head: bytes, path: Path) -> None:
    """Refuse a text that begins as Windows writes "Unicode"; its zeros would pass for those of a binary file."""
    if not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return
    beginning = head[:_SNIFF_BYTES].decode("utf-16", "ignore")
    if all(one.isprintable() or one.isspace() for one in beginning):
        hint = f"Convert it first: {_conversion('utf-16', path, path.suffix)}"
        raise Refusal("data.not_utf8", f"{path} is UTF-16, not UTF-8.", hint=hint)


def listed(names: Sequence[str]) -> str:
    """Names for a sentence: the first of very many, and of a very long one its beginning."""
    told = [name if len(name) <= _NAME_CHARS else f"{name[:_NAME_CHARS]}…" for name in names[:MOST_NAMES]]
    return ", ".join([*told, *(["…"] if len(names) > MOST_NAMES else [])]) or "none"
