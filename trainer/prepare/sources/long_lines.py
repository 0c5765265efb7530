"""The text of a JSON object that is too long a line to be in memory whole: its pieces, as they are read.

Only what is needed is understood of the JSON: where strings begin and end, how deep they stand, and which key is before
them. The pieces of the wanted string are cut between its escapes and decoded by json itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator

from trainer.prepare.errors import MOST_NAMES, listed
from trainer.prepare.sources.streams import whole_characters

__all__ = ["NoSuchKey", "NotAText", "string_pieces"]

_STRUCTURE = re.compile(rb'["{}\[\]:,]')
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# As far as no escape is cut: half a pair of surrogates is one only if what follows cannot be its other half.
_ESCAPES = re.compile(
    rb"(?:[^\\]++"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}"
    rb"(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[^dD][0-9a-fA-F]{3}|\\u[dD][^c-fC-F][0-9a-fA-F]{2}))"
    rb"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    rb"|\\[^u])*+",
    re.DOTALL,
)
_LONGEST_KEY = 1024
_ADDRESS, _LONGEST_ADDRESS = b"url", 1 << 16


class NoSuchKey(Exception):
    """The object has other keys than the wanted one: these."""


class NotAText(Exception):
    """There is something else than a string under the key."""


def string_pieces(chunks: Iterable[bytes], key: str) -> Generator[str, None, str]:
    """The pieces of the string under a key of the object that `chunks` are, one after the other; returns its `url`.

    Raises NoSuchKey, NotAText, or ValueError for what is no JSON. A text that is null has no pieces.
    """
    scanner = _Scanner(json.dumps(key, ensure_ascii=False).encode()[1:-1])
    rest = b""
    for chunk in chunks:
        for raw, ends in scanner.feed(chunk):
            raw = rest + raw
            safe, rest = (raw, b"") if ends else _safe(raw)
            if safe:
                yield json.loads(b'"%b"' % safe)
    if not scanner.ended:
        raise ValueError("it has no end")
    if scanner.found is None:
        raise NoSuchKey(listed(sorted(scanner.keys)))
    if not scanner.found and scanner.value not in (b"", b"null"):
        raise NotAText(scanner.value.decode("utf-8", "replace")[:20])
    address: str = json.loads(b'"%b"' % scanner.address)
    return address


def _safe(raw: bytes) -> tuple[bytes, bytes]:
    """Cut off what may belong to the next piece: of an escape, or of a character."""
    match = _ESCAPES.match(raw)
    whole, part = whole_characters(raw[: match.end()] if match else b"")
    return whole, part + raw[match.end() if match else 0 :]


class _Scanner:
    """Walks through the bytes of one object. `found`: whether a string stood under the key; None: no such key."""

    def __init__(self, wanted: bytes) -> None:
        self._wanted = wanted
        self._depth = 0
        self._inside = False  # a string
        self._text = False  # the wanted one
        self._last = b""  # string: perhaps a key
        self._key: bytes | None = None
        self._left = b""
        self.found: bool | None = None
        self.value = b""
        self.address = b""
        self.keys: set[str] = set()

    @property
    def ended(self) -> bool:
        """Whether as much was closed as was opened."""
        return self._depth == 0 and not self._inside

    @property
    def _is_address(self) -> bool:
        """Whether a string here is the object's address."""
        return self._depth == 1 and self._key == _ADDRESS and not self._text

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bool]]:
        """Some more of the object; yields (a part of the wanted string, whether it is the last)."""
        raw, place = self._left + chunk, 0
        self._left = b""
        while place < len(raw):
            if self._inside:
                place = yield from self._string(raw, place)
            else:
                place = self._between(raw, place)

    def _string(self, raw: bytes, place: int) -> Generator[tuple[bytes, bool], None, int]:
        """Up to the end of a string, or of what there is of it."""
        match = _STRING.match(raw, place)
        assert match is not None
        stop = match.end()
        ends = stop < len(raw) and raw[stop : stop + 1] == b'"'
        if not ends:
            # A backslash whose other half comes with the next chunk.
            self._left = raw[stop:]
        most = _LONGEST_ADDRESS if self._is_address else _LONGEST_KEY
        if self._text:
            yield raw[place:stop], ends
        elif len(self._last) < most:
            self._last += raw[place:stop]
        if ends and self._is_address:
            self.address = self._last if len(self._last) < most else b""
        if ends:
            self._inside = self._text = False
            return stop + 1
        return len(raw)

    def _between(self, raw: bytes, place: int) -> int:
        """Up to the next mark of structure, and over it."""
        match = _STRUCTURE.search(raw, place)
        stop = match.start() if match else len(raw)
        if self._key == self._wanted and self._depth == 1 and self.found is False:
            self.value += raw[place:stop].strip()[:_LONGEST_KEY]
        mark = raw[stop : stop + 1]
        if mark == b'"':
            self._inside, self._last = True, b""
            if self._depth == 1 and self._key == self._wanted:
                self._text = self.found = True
        elif mark in (b"{", b"["):
            if self._depth == 1 and self._key == self._wanted:
                self.value += mark
            self._depth += 1
        elif mark in (b"}", b"]"):
            self._depth -= 1
        elif mark == b"," and self._depth == 1:
            self._key = None
        elif mark == b":" and self._depth == 1:
            self._key = self._last
            if len(self.keys) <= MOST_NAMES:
                self.keys.add(self._last[:_LONGEST_KEY].decode("utf-8", "replace"))
            if self._key == self._wanted and self.found is None:
                self.found = False
        return stop + 1
