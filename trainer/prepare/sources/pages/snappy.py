"""Snappy in parts. Its format has no stream, but its writers pack each 64 KiB by themselves and name none of them.

Where such a part ends is found by passing over its tags; it is a whole Snappy text of its own once its length stands
before it. https://github.com/google/snappy/blob/main/format_description.txt
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.prepare.sources.pages.part import Part

__all__ = ["blocks"]

_BLOCK_BYTES = 64 << 10
_MOST_PACKED_BYTES = 32 + _BLOCK_BYTES + _BLOCK_BYTES // 6
"""What 64 KiB are packed to at most."""
_READ_BYTES = 4 * _MOST_PACKED_BYTES
_WHOLE_BYTES = 8 << 20
"""What is unpacked at once: to find the parts of more takes three times as long as to unpack them."""
_LONG_LITERAL = 60
"""From here on a literal's tag has its length in the bytes that follow it."""


def _tag_bytes(tag: int) -> int:
    """What a tag takes with what belongs to it; 0 for one that says so in its next bytes."""
    size = tag >> 2
    return (size + 2 if size < _LONG_LITERAL else 0, 2, 3, 5)[tag & 3]


def _unpacked_bytes(tag: int) -> int:
    return (tag >> 2 & 7) + 4 if tag & 3 == 1 else (tag >> 2) + 1


_TAG_BYTES, _UNPACKED_BYTES = [list(map(count, range(256))) for count in (_tag_bytes, _unpacked_bytes)]


def blocks(packed: Part) -> Iterator[bytes]:
    """The unpacked bytes, 64 KiB at a time; all at once if they are few, or from where they were packed otherwise."""
    import pyarrow

    whole = packed.again()
    data = packed.read(_READ_BYTES)
    length, at = _length(data)
    if length <= _WHOLE_BYTES:
        yield _at_once(whole, length)
        return
    done = 0
    try:
        while done < length:
            if len(data) - at < _MOST_PACKED_BYTES:
                data, at = data[at:] + packed.read(_READ_BYTES), 0
            size = min(length - done, _BLOCK_BYTES)
            end = _end(data, at, size)
            yield pyarrow.decompress(_varint(size) + data[at:end], size, "snappy", asbytes=True)
            at, done = end, done + size
    except (IndexError, OSError):
        # Damaged, or by a writer with other habits: pyarrow knows which.
        yield _at_once(whole, length)[done:]


def _at_once(packed: Part, length: int) -> bytes:
    import pyarrow

    unpacked: bytes = pyarrow.decompress(packed.read(packed.bytes), length, "snappy", asbytes=True)
    return unpacked


def _end(data: bytes, at: int, size: int) -> int:
    """Where the tags end that give `size` bytes. Raises IndexError if no tag ends there."""
    while size > 0:
        tag = data[at]
        if step := _TAG_BYTES[tag]:
            at += step
            size -= _UNPACKED_BYTES[tag]
        else:
            start = at + (tag >> 2) - _LONG_LITERAL + 2
            length = int.from_bytes(data[at + 1 : start], "little") + 1
            at, size = start + length, size - length
    if size < 0 or at > len(data):
        raise IndexError(at)
    return at


def _length(data: bytes) -> tuple[int, int]:
    """The number that a Snappy text begins with, and where it ends."""
    length = 0
    for place, byte in enumerate(data[:5]):
        length |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return length, place + 1
    raise EOFError("its Snappy has no length")


def _varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])
