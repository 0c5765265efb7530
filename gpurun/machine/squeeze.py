"""Compression of one part after the other, as hard as the link leaves time for."""

from __future__ import annotations

import os
import threading
import zlib

from gpurun.machine.pack import Codec

_FIRST_LEVEL = 3
_MOST_LEVEL = 9
_GZIP_LEVEL = 1


class Squeeze:
    """Compresses parts, each by itself. Its level follows the link: higher while sending is what takes the time."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._cores = threading.Semaphore(os.cpu_count() or 1)  # More at once would be no faster, and take memory.
        self.level = _FIRST_LEVEL

    def squeezed(self, content: bytes) -> bytes:
        """One part, compressed; any number of threads may ask at once."""
        if self._codec == "gzip":
            compressor = zlib.compressobj(_GZIP_LEVEL, wbits=31)
            return compressor.compress(content) + compressor.flush()
        import zstandard

        with self._cores:
            return zstandard.ZstdCompressor(level=self.level).compress(content)

    def learn(self, squeeze_s: float, send_s: float) -> None:
        """Take in how long one part took to compress and then to send."""
        if send_s > 4 * squeeze_s:
            self.level = min(self.level + 1, _MOST_LEVEL)
        elif send_s < squeeze_s:
            self.level = max(self.level - 1, 1)
