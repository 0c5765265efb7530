"""The times that flags take: read once each, and refused with what would do."""

from __future__ import annotations

import re
from math import ceil

MOST_SETUP_MINUTES = 24 * 60
_LEAST_SILENCE_S, _MOST_SILENCE_S = 300, 24 * 3600
_MOST_QUEUE_S = 30 * 24 * 3600
_LEAST_HOLD_S, _MOST_HOLD_S = 60, 24 * 3600


def span_s(text: str) -> int | None:
    """The seconds of `90s`, `10m`, `1h` or `2d`; None where it is no span of time."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]] if found else None


def silence_s(text: str) -> int:
    """The seconds of --give-up-after, 0 where it was not typed."""
    from gpurun.core.errors import UsageError

    seconds = span_s(text) or 0
    if text and not _LEAST_SILENCE_S <= seconds <= _MOST_SILENCE_S:
        what = f"--give-up-after {text!r} is no time to wait for a silent machine: 5m at least, and at most a day."
        raise UsageError("usage.give_up_after", what, hint="Write minutes or hours: --give-up-after 45m")
    return seconds


def queue_s(text: str) -> int:
    """The seconds of --queue, 0 where it was not typed."""
    from gpurun.core.errors import UsageError

    seconds = span_s(text) or 0
    if text and not 60 <= seconds <= _MOST_QUEUE_S:
        what = f"--queue {text!r} is no time for a job to wait: 1m at least, and at most 30d."
        raise UsageError("usage.queue", what, hint="Write hours or days: --queue 12h")
    return seconds


def hold_s(text: str) -> int:
    """The seconds of --hold-on-failure, which is minutes, a span of time, or `off`."""
    from gpurun.core.errors import UsageError

    if text == "off":
        return 0
    seconds = span_s(f"{text}m" if text.isascii() and text.isdigit() else text) or 0
    if not _LEAST_HOLD_S <= seconds <= _MOST_HOLD_S:
        what = f"--hold-on-failure {text!r} is not a time to hold a machine: 1m at least, and at most a day."
        raise UsageError("usage.hold_on_failure", what, hint="Write --hold-on-failure 15m, or off.")
    return seconds


def setup_limit_s(minutes: float | None) -> int:
    """The seconds of --setup-limit, 0 where it was not typed."""
    from gpurun.core.errors import UsageError

    if minutes is None:
        return 0
    if not 0 < minutes <= MOST_SETUP_MINUTES:
        what = f"--setup-limit {minutes:g} is no time for a script: it must be above 0, and at most a day."
        raise UsageError("usage.setup_limit", what, hint="Write minutes: --setup-limit 30")
    return ceil(60 * minutes)
