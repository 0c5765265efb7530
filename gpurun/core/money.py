"""Integer micro-dollars: all price arithmetic, rounded up, so that no figure looks better than it is.

One dollar is 1,000,000 micros. Prices are in micros per hour. No amount of money is a float.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, InvalidOperation
from enum import StrEnum
from typing import NewType

from gpurun.core.errors import UsageError

Micros = NewType("Micros", int)


class Figure(StrEnum):
    """How exactly a sum of money is known."""

    MEASURED = "measured"
    """Exact: every machine was seen to its end."""
    BILLED = "billed"
    """From the bill: the end of a machine was not seen, and the provider's bill states the cost."""
    BOUND = "bound"
    """An upper bound: the beginning or end of a machine was not seen, or it may still exist."""
    FLOOR = "floor"
    """A lower bound: more was paid than is recorded."""
    SO_FAR = "so far"
    """Running: a process watches the machine, whose cost grows every second."""


MICROS_PER_USD = 1_000_000
SECONDS_PER_HOUR = 3_600
_MICRO = Decimal(1) / MICROS_PER_USD


def parse_usd(text: str, *, name: str = "--max-cost", example: str = "", is_limit: bool = True) -> Micros:
    """Read a dollar amount such as `25`, `$0.50` or `12.345678`; UsageError for words, nan, zero and less.

    `name` says where it was written, `example` how it is written there. A limit is rounded down, a price up.
    """
    like = example or f"{name} 25 or {name} 0.50"
    try:
        if "_" in text or not text.isascii():  # Decimal reads 2_5 as 25, and digits of any script.
            raise InvalidOperation
        amount = Decimal(text.strip().removeprefix("$"))
    except InvalidOperation:
        raise UsageError(
            "money.not_a_number",
            f"{name} {text!r} is not an amount of dollars.",
            hint=f"Write a plain number, for example {like}.",
        ) from None
    if not amount.is_finite() or amount <= 0 or (is_limit and amount < _MICRO):
        raise UsageError(
            "money.not_positive",
            f"{name} {text!r} is not a positive amount of dollars.",
            hint=f"Write an amount above zero, for example {like}.",
        )
    if amount > 1_000_000:
        raise UsageError(
            "money.too_large",
            f"{name} {text!r} is more than a million dollars.",
            hint="Write it in dollars, not in cents or micro-dollars.",
        )
    return usd(amount.quantize(_MICRO, ROUND_FLOOR) if is_limit else amount)


def usd(amount: Decimal | str | int) -> Micros:
    """Convert an exact decimal dollar amount to micros, rounding up."""
    return Micros(int((Decimal(amount) * MICROS_PER_USD).to_integral_value(ROUND_CEILING)))


def billed_seconds(seconds: float, billing_unit_s: int) -> int:
    """Round a duration up to the provider's billing unit."""
    whole = -int(-max(0.0, seconds) // 1)
    unit = max(1, billing_unit_s)
    return -(-whole // unit) * unit


def cost_of(rate_per_hour: Micros, seconds: float, billing_unit_s: int = 1) -> Micros:
    """Return the cost of `seconds` at an hourly price, rounded up to the billing unit and then to the micro-dollar."""
    return Micros(-(-rate_per_hour * billed_seconds(seconds, billing_unit_s) // SECONDS_PER_HOUR))


def total(*parts: Micros) -> Micros:
    """Return the sum of amounts."""
    return Micros(sum(parts))


def times(unit: Micros, count: int) -> Micros:
    """Return a unit price multiplied by a count."""
    return Micros(unit * count)


def share_of(amount: Micros, part: float, whole: float) -> Micros:
    """Return the share of an amount for a part of a whole, rounded up; 0 if the whole is 0."""
    share = Decimal(part) / Decimal(whole) if whole > 0 else Decimal(0)
    return Micros(min(amount, int((share * amount).to_integral_value(ROUND_CEILING))))


def left_of(cap: Micros, spent: Micros) -> Micros:
    """Return what remains of a cap; negative if it is exceeded."""
    return Micros(cap - spent)


def seconds_within(cap: Micros, rate_per_hour: Micros, billing_unit_s: int = 1) -> float:
    """Return the longest time, in whole billing units, that a cap pays for; infinite if the price is zero."""
    if rate_per_hour <= 0:
        return float("inf")
    units = cap * SECONDS_PER_HOUR // (rate_per_hour * max(1, billing_unit_s))
    return float(max(0, units) * max(1, billing_unit_s))


def seconds_paid(amount: Micros, rate_per_hour: Micros) -> int:
    """Return the whole seconds that an amount paid for at a price above zero, rounded up."""
    return -(-amount * SECONDS_PER_HOUR // rate_per_hour)


def ratio_of(part: Micros, whole: Micros) -> float:
    """Return `part` divided by `whole`; 0.0 if the whole is 0."""
    return part / whole if whole else 0.0


def percent_of(part: Micros, whole: Micros) -> float:
    """Return `part` in percent of `whole`; 0.0 if the whole is 0."""
    return 100.0 * ratio_of(part, whole)


def format_usd(amount: Micros) -> str:
    """Return the amount with two decimals, rounded up: `$7.97`. A minus sign comes first."""
    cents = -(-abs(amount) // 10_000)
    return f"{'-' if amount < 0 else ''}${cents // 100:,}.{cents % 100:02d}"


def format_figure(amount: Micros, figure: Figure) -> str:
    """Return the amount with its exactness: `$7.97`, `≤$7.97` at most, `≥$7.97` at least."""
    return {Figure.BOUND: "≤", Figure.FLOOR: "≥"}.get(figure, "") + format_usd(amount)


def figure_words(amount: Micros, figure: Figure) -> str:
    """Return the same for a sentence: `$7.97`, `at most $7.97`, `at least $7.97`."""
    return {Figure.BOUND: "at most ", Figure.FLOOR: "at least "}.get(figure, "") + format_usd(amount)


def format_left(amount: Micros) -> str:
    """Return what remains, rounded down, so that it is never overstated: `$0.00` for half a cent."""
    return format_usd(Micros(amount // 10_000 * 10_000))


def format_exact_usd(amount: Micros) -> str:
    """Return the amount with all its decimals, at least two: `$0.005`, `$12.50`. For the marks of an axis."""
    whole, micros = divmod(abs(amount), MICROS_PER_USD)
    decimals = f"{micros:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if amount < 0 else ''}${whole:,}.{decimals}"


def format_rate(rate_per_hour: Micros) -> str:
    """Return an hourly price with two decimals, rounded up: `$2.49/h`."""
    return f"{format_usd(rate_per_hour)}/h"
