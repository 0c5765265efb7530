"""What is read from: a part of a file as a stream of its own, and the number that many things begin with."""

from __future__ import annotations

import os
from typing import Protocol

__all__ = ["Part", "Source", "varint"]

_MOST_BITS = 63


class Source(Protocol):
    """Bytes, one after the other."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes, fewer only at the end."""
        ...


def varint(source: Source) -> int:
    """A number in bytes of seven bits, the lowest first; EOFError if the source ends in it, or it has no end."""
    number = shift = 0
    while shift + 7 <= _MOST_BITS and (byte := source.read(1)):
        number |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return number
        shift += 7
    raise EOFError("a number without an end")


class Part:
    """So many bytes of a file from a place on; who else reads the file does not move it."""

    def __init__(self, descriptor: int, place: int, size: int) -> None:
        self._whole, self.bytes = (descriptor, place, size), size
        self._descriptor, self._place, self._left = descriptor, place, size

    def again(self) -> Part:
        """The same from its beginning."""
        return Part(*self._whole)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end; EOFError if the file ends first."""
        pieces = []
        while (wanted := min(size, self._left)) > 0:
            piece = os.pread(self._descriptor, wanted, self._place)
            if not piece:
                raise EOFError("the file ends in a page")
            pieces.append(piece)
            self._place, self._left, size = self._place + len(piece), self._left - len(piece), size - len(piece)
        return b"".join(pieces)
