"""The codecs with which this machine can decompress the parts of an upload."""

from __future__ import annotations

import shutil
import zlib

from gpurun.remote.agent.system import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, List


def codecs() -> List[str]:
    """Return the codecs that `inflater` accepts on this machine, the best first."""
    return (["zstd"] if zstd_module() or shutil.which("zstd") else []) + ["gzip"]


def inflater(codec: str) -> Callable[[bytes, int], bytes]:
    """Return a function that decompresses one part of known size. It raises Refusal if the part is damaged."""
    module: Any = zstd_module() if codec == "zstd" else None

    def gzipped(data: bytes, size: int) -> bytes:
        return zlib.decompressobj(wbits=31).decompress(data, size + 1)

    def by_module(data: bytes, size: int) -> bytes:
        if hasattr(module, "ZstdFile"):
            content: bytes = module.ZstdDecompressor().decompress(data, size + 1)
            return content
        return bytes(module.ZstdDecompressor().decompress(data, max_output_size=size + 1))

    def by_program(data: bytes, size: int) -> bytes:
        return program_output(["zstd", "-dcq"], data, size + 1)

    inflate = gzipped if codec == "gzip" else by_module if module else by_program
    if inflate is by_program and shutil.which("zstd") is None:
        raise Refusal("no_codec", "this machine has no zstd")
    errors = (zlib.error, EOFError, *([module.ZstdError] if module else []))

    def checked(data: bytes, size: int) -> bytes:
        try:
            return inflate(data, size)
        except errors as error:
            raise Refusal("cut_stream", "a part is damaged: %s" % error) from None

    return checked


def program_output(command: List[str], data: bytes, most: int) -> bytes:
    """Return a program's output for the data, at most `most` bytes, because a part may be made to exhaust memory."""
    import subprocess
    import threading

    from gpurun.remote.agent.processes import environment

    def feed() -> None:
        try:
            child.stdin.write(data)  # type: ignore[union-attr]
            child.stdin.close()  # type: ignore[union-attr]
        except OSError:
            return  # The program has ended, or is being ended.

    child = subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    with child.stdout as stdout:  # type: ignore[union-attr]
        out: bytes = stdout.read(most)
    child.kill()
    thread.join()
    child.wait()
    return out


def zstd_module() -> Any:
    """Return this Python's zstd module; None if it has none."""
    import importlib

    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
