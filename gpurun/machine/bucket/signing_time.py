"""Signing by S3's clock instead of this machine's: a laptop whose clock is an hour off is no reason to refuse a run.

botocore signs with the time that `botocore.auth.get_current_datetime` tells. That is put behind a correction once,
which is nothing except for the thread that is inside `signing_at`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

_correction = threading.local()
_lock = threading.Lock()


@contextmanager
def signing_at(ahead_s: float) -> Iterator[None]:
    """Sign what this thread asks for as if this machine's clock were so many seconds behind what it says."""
    _put_correction_in()
    before = getattr(_correction, "seconds", 0.0)
    _correction.seconds = ahead_s
    try:
        yield
    finally:
        _correction.seconds = before


def _put_correction_in() -> None:
    from botocore import auth  # type: ignore[import-untyped]

    with _lock:
        plain = getattr(auth, "get_current_datetime", None)  # An older botocore has none: S3's refusal is told then.
        if plain is None or hasattr(plain, "is_corrected"):
            return

        def corrected(*given: Any, **named: Any) -> datetime:
            now: datetime = plain(*given, **named)
            return now - timedelta(seconds=getattr(_correction, "seconds", 0.0))

        corrected.is_corrected = True  # type: ignore[attr-defined]
        auth.get_current_datetime = corrected
