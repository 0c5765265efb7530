"""Parses durations (`90s`, `10m`, `1h`, `2d`), and checks the limits of each flag that has a duration."""

from __future__ import annotations

import re
from math import ceil

MOST_SETUP_MINUTES = 24 * 60
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def span_s(text: str) -> int | None:
    """Return the seconds of `90s`, `10m`, `1h` or `2d`; None if it is not a duration."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    return int(found[1]) * _UNITS[found[2]] if found else None


def give_up_after_s(text: str) -> int:
    """Return the seconds of --give-up-after."""
    wrong = f"--give-up-after {text!r} is out of range: wait for a silent machine from 5m to a day."
    return _parse_within(text, 300, 86400, "usage.give_up_after", wrong, "Write minutes or hours: --give-up-after 45m")


def queue_s(text: str) -> int:
    """Return the seconds of --queue."""
    wrong = f"--queue {text!r} is out of range: a job may wait from 1m to 30d."
    return _parse_within(text, 60, 30 * 86400, "usage.queue", wrong, "Write hours or days: --queue 12h")


def wait_s(text: str) -> int:
    """Return the seconds of --wait."""
    wrong = f"--wait {text!r} is out of range: wait for a machine from 1m to 7d."
    return _parse_within(text, 60, 7 * 86400, "usage.wait", wrong, "Write hours: --wait 6h")


def until_wall(text: str, now: float) -> float:
    """Return the next occurrence of a local time of day, for --until; UsageError if it is not a time of day."""
    from datetime import datetime, timedelta

    from gpurun.core.errors import UsageError

    found = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", text)
    if not found:
        raise UsageError(
            "usage.until", f"--until {text!r} is not a time of day.", hint="Write for example --until 08:00"
        )
    today = datetime.fromtimestamp(now).replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
    return (today if today.timestamp() > now else today + timedelta(days=1)).timestamp()


def limit_s(text: str) -> int:
    """Return the seconds of --time, which is a duration, or a time as for sbatch: MINUTES, H:MM:SS, D-HH:MM:SS."""
    wrong = f"--time {text!r} is out of range: a job may take from 1m to a year."
    found = re.fullmatch(r"(?:([0-9]{1,3})-)?([0-9]{1,4}):([0-9]{2})(?::([0-9]{2}))?", text)
    if found:
        days, first, second, third = (None if part is None else int(part) for part in found.groups())
        hours = first or 0, second or 0, third or 0
        # As in sbatch: after days, two parts are HH:MM; without days, two parts are MM:SS and three are H:MM:SS.
        seconds = 60 * hours[0] + hours[1] if days is None and third is None else 3600 * hours[0] + 60 * hours[1]
        text = f"{86400 * (days or 0) + seconds + hours[2]}s"
    span = f"{text}m" if text.isascii() and text.isdigit() else text
    return _parse_within(
        span, 60, 365 * 86400, "usage.time", wrong, "For example, write --time 30m or --time 1-12:00:00"
    )


def idle_s(text: str) -> int:
    """Return the seconds of --idle, 0 for `off`."""
    wrong = f"--idle {text!r} is out of range: an idle job can be stopped after 1m to a day."
    hint = "Write minutes or hours: --idle 30m; or never: --idle off"
    return 0 if text == "off" else _parse_within(text, 60, 86400, "usage.idle", wrong, hint)


def sync_s(text: str) -> int:
    """Return the seconds of --sync."""
    wrong = f"--sync {text!r} is out of range: files can be downloaded every 10s to 1h."
    return _parse_within(text, 10, 3600, "usage.sync", wrong, "Write minutes: --sync 5m")


def silent_s(text: str) -> int:
    """Return the seconds of --silent, 0 for `off`."""
    wrong = f"--silent {text!r} is out of range: a silent job can be stopped after 1m to a day."
    hint = "Write minutes or hours: --silent 30m; or never: --silent off"
    return 0 if text == "off" else _parse_within(text, 60, 86400, "usage.silent", wrong, hint)


def parse_hold_s(text: str) -> int:
    """Return the seconds of --hold-on-failure, which is a number of minutes or a duration; 0 for `off`."""
    wrong = f"--hold-on-failure {text!r} is out of range: a machine can be held from 1m to a day."
    span = f"{text}m" if text.isascii() and text.isdigit() else text
    hint = "Write --hold-on-failure 15m, or off."
    return 0 if text == "off" else _parse_within(span, 60, 86400, "usage.hold_on_failure", wrong, hint)


def parse_setup_limit_s(minutes: float) -> int:
    """Return the seconds of --setup-limit."""
    from gpurun.core.errors import UsageError

    if not 0 < minutes <= MOST_SETUP_MINUTES:
        what = f"--setup-limit {minutes:g} is out of range: a script may take more than 0 minutes and at most a day."
        raise UsageError("usage.setup_limit", what, hint="Write minutes: --setup-limit 30")
    return ceil(60 * minutes)


def _parse_within(text: str, least_s: int, most_s: int, code: str, wrong: str, hint: str) -> int:
    """Return the seconds of a duration between two bounds; UsageError for anything else."""
    from gpurun.core.errors import UsageError

    seconds = span_s(text)
    if seconds is None or not least_s <= seconds <= most_s:
        raise UsageError(code, wrong, hint=hint)
    return seconds


def day_wall(text: str) -> float | None:
    """Return the wall time at which a local day begins; None for an empty text."""
    from datetime import datetime

    from gpurun.core.errors import UsageError

    if not text:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError("usage.since", f"--since {text!r} is not a date.", hint="Write --since 2026-11-01.") from None
