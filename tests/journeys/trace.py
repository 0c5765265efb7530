"""Record which files are entered while a block runs."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]


class Trace:
    """The files of gpurun/ and trainer/ in which a function was called.

    `files` has all of them. `below` has, for each file of `windows`, the files entered while a function of that file
    ran, in the same thread: other threads belong to other journeys. A file that is only imported is not entered.
    """

    def __init__(self, *windows: str) -> None:
        self.files: set[str] = set()
        self.below: dict[str, set[str]] = {window: set() for window in windows}
        self._open: Counter[tuple[int, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        name = code.co_filename.removeprefix(f"{ROOT}/")
        if not name.startswith(("gpurun/", "trainer/")) or name.endswith("__init__.py"):
            return
        if not code.co_flags & inspect.CO_OPTIMIZED:  # The body of a module or of a class.
            return
        if name in self.below and event in ("call", "return"):
            self._open[threading.get_ident(), name] += 1 if event == "call" else -1
        if event == "call":
            self.files.add(name)
            for window in [window for window in self.below if self._open[threading.get_ident(), window] > 0]:
                self.below[window].add(name)


@contextmanager
def traced(*windows: str) -> Iterator[Trace]:
    """Trace this thread, and the threads that it starts, until the block ends."""
    trace = Trace(*windows)
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
