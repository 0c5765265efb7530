"""The bytes of a page as they are unpacked, a block at a time, all of it by pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainer.prepare.sources.pages import snappy
from trainer.prepare.sources.pages.part import Part

__all__ = ["CODECS", "Unpacked", "unpacked"]

_BLOCK_BYTES = 64 << 10


class Unpacked:
    """The bytes of a page, read one after the other."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._block, self._at = blocks, b"", 0

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes; EOFError if the page ends first."""
        pieces = []
        while size > 0:
            if self._at == len(self._block):
                self._block, self._at = next(self._blocks, b""), 0
                if not self._block:
                    raise EOFError("a page is shorter than it says")
            piece = self._block[self._at : self._at + size]
            pieces.append(piece)
            self._at, size = self._at + len(piece), size - len(piece)
        return b"".join(pieces)


def unpacked(part: Part, codec: str) -> Unpacked:
    """A page's body unpacked by a codec of CODECS, by the name that pyarrow gives it."""
    return Unpacked(CODECS[codec](part))


def _as_it_is(part: Part) -> Iterator[bytes]:
    return iter(lambda: part.read(_BLOCK_BYTES), b"")


def _stream(codec: str) -> Callable[[Part], Iterator[bytes]]:
    def blocks(part: Part) -> Iterator[bytes]:
        import pyarrow

        with pyarrow.CompressedInputStream(pyarrow.PythonFile(_Readable(part), "r"), codec) as stream:
            yield from iter(lambda: stream.read(_BLOCK_BYTES), b"")

    return blocks


class _Readable:
    """A part with what pyarrow asks of a file."""

    closed = False

    def __init__(self, part: Part) -> None:
        self.read = part.read

    def close(self) -> None:
        self.closed = True


CODECS: dict[str, Callable[[Part], Iterator[bytes]]] = {
    "UNCOMPRESSED": _as_it_is,
    "ZSTD": _stream("zstd"),
    "GZIP": _stream("gzip"),
    "BROTLI": _stream("brotli"),
    "SNAPPY": snappy.blocks,
}
"""LZ4 is not among them: what it has in Parquet can be unpacked only as a whole."""
