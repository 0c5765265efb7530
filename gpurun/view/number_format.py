"""Durations, sizes, counts, hashes and metrics for users. Money is formatted in core.money."""

from __future__ import annotations

import math

from gpurun.core.places import place_facts

UNKNOWN = "—"


def format_duration(seconds: float) -> str:
    """Return `42 s`, `9 m 05 s`, `3 h 08 m` or `2 d 03 h`. Negative counts as zero; not finite gives UNKNOWN."""
    if not math.isfinite(seconds):
        return UNKNOWN
    whole = max(0, int(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d} h"
    if hours:
        return f"{hours} h {minute:02d} m"
    return f"{minute} m {second:02d} s" if minutes else f"{second} s"


def format_exact(seconds: int) -> str:
    """Return a duration to the second, without zero parts, so that sums can be checked: `3 h 42 m`, `1 m 30 s`."""
    parts = ((seconds // 3600, "h"), (seconds % 3600 // 60, "m"), (seconds % 60, "s"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"


def format_stopwatch(seconds: float) -> str:
    """Return the duration of a phase in short form, such as `1:48` or `2:03:10`."""
    whole = max(0, int(seconds)) if math.isfinite(seconds) else 0
    hours, minutes, second = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02d}:{second:02d}" if hours else f"{minutes}:{second:02d}"


def format_whole(number: int) -> str:
    """Return an integer with spaces between thousands: `2 410`."""
    return f"{number:,}".replace(",", " ")


def format_files(number: int) -> str:
    """Return, for example, `1 file` or `2 410 files`."""
    return f"{format_whole(number)} {'file' if number == 1 else 'files'}"


def format_count(number: float) -> str:
    """Return a count in short form: `960`, `112 k`, `124 M`, `2.5 B`, `1.3 T`."""
    return _format_scaled(number, 1000.0, ("", " k", " M", " B", " T"))


def format_bytes(number: float) -> str:
    """Return a size in decimal units: `512 B`, `450 kB`, `3.1 GB`."""
    return _format_scaled(number, 1000.0, (" B", " kB", " MB", " GB", " TB", " PB"))


def _format_scaled(number: float, base: float, units: tuple[str, ...]) -> str:
    """Return the number in the largest unit in which it is at least 1; with one decimal if that is below 10.

    The first unit has no decimals.
    """
    if not math.isfinite(number):
        return UNKNOWN
    value, index = float(number), 0
    while index + 1 < len(units) and abs(value) >= (999.5 if index else base):
        value, index = value / base, index + 1
    decimals = 1 if index and abs(value) < 9.95 else 0
    text = f"{value:.{decimals}f}"
    return text.removesuffix(".0") + units[index]


def short_hash(digest: str) -> str:
    """Return the first and last four digits, such as `9f2c…1ab4`. A short digest is returned whole."""
    return digest if len(digest) <= 9 else f"{digest[:4]}…{digest[-4:]}"


def format_loss(loss: float | None) -> str:
    """Return a loss with three decimals; from 1000 on, in scientific notation. None and non-finite give UNKNOWN."""
    if loss is None or not math.isfinite(loss):
        return UNKNOWN
    return f"{loss:.3f}" if abs(loss) < 1000 else f"{loss:.2e}"


def format_small(number: float | None) -> str:
    """Return a small number such as a learning rate in the form `4.1e-4`; 0 gives `0`."""
    if number is None or not math.isfinite(number):
        return UNKNOWN
    if number == 0:
        return "0"
    mantissa, _, exponent = f"{number:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def format_percent(share: float, decimals: int = 0) -> str:
    """Return a share in percent: `50 %`, or `50.5 %` with one decimal. A share that is not finite gives UNKNOWN."""
    return f"{100 * share:.{decimals}f} %" if math.isfinite(share) else UNKNOWN


def why_free(provider: str) -> str:
    """Return a phrase about why a run at that provider costs nothing."""
    return place_facts(provider).why_free


def format_cards(gpu: str, gpu_count: int, nodes: int) -> str:
    """Return the GPUs and nodes, such as `8×A100`, `2×8×A100`, `cpu` or `2×cpu`."""
    cards = f"{gpu_count // nodes}×{gpu}" if gpu_count else "cpu"
    return f"{nodes}×{cards}" if nodes > 1 else cards
