"""The codecs that this machine can take a pack in with."""

from __future__ import annotations

import sys

from gpurun.machine.agent.protocol import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Tuple, Type


def decompressed(codec: str) -> Tuple[Any, Tuple[Type[Exception], ...]]:
    """Standard input decompressed, and the errors that mean it is damaged."""
    import zlib

    if codec == "gzip":
        import gzip

        return gzip.GzipFile(fileobj=sys.stdin.buffer), (EOFError, zlib.error, gzip.BadGzipFile)
    module = zstd_module()
    if hasattr(module, "ZstdFile"):
        return module.ZstdFile(sys.stdin.buffer), (EOFError, module.ZstdError)
    if module is not None:
        return module.ZstdDecompressor().stream_reader(sys.stdin.buffer), (module.ZstdError,)
    import shutil
    import subprocess

    if shutil.which("zstd") is None:
        raise Refusal("no_codec", "this machine has no zstd")
    child = subprocess.Popen(["zstd", "-dcq"], stdin=sys.stdin, stdout=subprocess.PIPE)
    assert child.stdout is not None
    return child.stdout, ()


def zstd_module() -> Any:
    """The zstd module that this Python has, or None."""
    import importlib

    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
