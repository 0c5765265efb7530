"""Integer micro-dollars: all price arithmetic, rounded up, so that no figure flatters.

One dollar is 1,000,000 micros. Rates are micros per hour. Nothing here is a float of money.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, InvalidOperation
from enum import StrEnum
from typing import NewType

from gpurun.core.errors import UsageError

Micros = NewType("Micros", int)


class Figure(StrEnum):
    """What a sum of money is that was paid."""

    MEASURED = "measured"
    """Every machine was seen to its end."""
    BILLED = "billed"
    """The end of a machine was not seen, and its provider's bill says what it cost."""
    BOUND = "bound"
    """At most that: nobody saw when a machine began or ended, or whether it still lives."""
    FLOOR = "floor"
    """At least that: more was paid than is on record."""
    SO_FAR = "so far"
    """Somebody watches the machine, and it costs more every second."""


MICROS_PER_USD = 1_000_000
SECONDS_PER_HOUR = 3_600
_MICRO = Decimal(1) / MICROS_PER_USD


def parse_usd(text: str, *, name: str = "--max-cost", example: str = "", is_limit: bool = True) -> Micros:
    """Read a dollar amount such as `25`, `$0.50` or `12.345678`; zero or less, nan and words are UsageErrors.

    `name` says where it was written, `example` how it is written there. A limit is rounded down, a price up.
    """
    like = example or f"{name} 25 or {name} 0.50"
    try:
        if "_" in text or not text.isascii():  # Decimal reads 2_5 as 25, and any script's digits.
            raise InvalidOperation
        amount = Decimal(text.strip().removeprefix("$"))
    except InvalidOperation:
        raise UsageError(
            "money.not_a_number",
            f"{name} {text!r} is not an amount of dollars.",
            hint=f"Write a plain number, for instance {like}.",
        ) from None
    if not amount.is_finite() or amount <= 0 or (is_limit and amount < _MICRO):
        raise UsageError(
            "money.not_positive",
            f"{name} {text!r} is not a positive amount of dollars.",
            hint=f"Write an amount above zero, for instance {like}.",
        )
    if amount > 1_000_000:
        raise UsageError(
            "money.too_large",
            f"{name} {text!r} is more than a million dollars.",
            hint="Write it in dollars, not in cents or micro-dollars.",
        )
    return usd(amount.quantize(_MICRO, ROUND_FLOOR) if is_limit else amount)


def usd(amount: Decimal | str | int) -> Micros:
    """Turn an exact decimal dollar amount into micros, rounding up."""
    return Micros(int((Decimal(amount) * MICROS_PER_USD).to_integral_value(ROUND_CEILING)))


def billed_seconds(seconds: float, billing_unit_s: int) -> int:
    """Round a duration up to the provider's billing unit."""
    whole = -int(-max(0.0, seconds) // 1)
    unit = max(1, billing_unit_s)
    return -(-whole // unit) * unit


def cost_of(rate_per_hour: Micros, seconds: float, billing_unit_s: int = 1) -> Micros:
    """What `seconds` at an hourly rate cost once rounded up to the billing unit and then to the micro-dollar."""
    return Micros(-(-rate_per_hour * billed_seconds(seconds, billing_unit_s) // SECONDS_PER_HOUR))


def total(*parts: Micros) -> Micros:
    """Add amounts."""
    return Micros(sum(parts))


def times(unit: Micros, count: int) -> Micros:
    """A unit price, `count` times."""
    return Micros(unit * count)


def share_of(amount: Micros, part: float, whole: float) -> Micros:
    """What of an amount falls to a part of a whole, rounded up; nothing of a whole that is nothing."""
    share = Decimal(part) / Decimal(whole) if whole > 0 else Decimal(0)
    return Micros(min(amount, int((share * amount).to_integral_value(ROUND_CEILING))))


def left_of(cap: Micros, spent: Micros) -> Micros:
    """What remains of a cap; negative when it is broken."""
    return Micros(cap - spent)


def seconds_within(cap: Micros, rate_per_hour: Micros, billing_unit_s: int = 1) -> float:
    """The longest whole number of billing units that a cap pays for; infinite when the rate is zero."""
    if rate_per_hour <= 0:
        return float("inf")
    units = cap * SECONDS_PER_HOUR // (rate_per_hour * max(1, billing_unit_s))
    return float(max(0, units) * max(1, billing_unit_s))


def seconds_paid(amount: Micros, rate_per_hour: Micros) -> int:
    """The whole seconds that an amount was paid for at a rate above zero, rounded up."""
    return -(-amount * SECONDS_PER_HOUR // rate_per_hour)


def ratio_of(part: Micros, whole: Micros) -> float:
    """How many times `whole` is `part`; 0.0 for a whole of nothing."""
    return part / whole if whole else 0.0


def percent_of(part: Micros, whole: Micros) -> float:
    """How many percent of `whole` is `part`; 0.0 for a whole of nothing."""
    return 100.0 * ratio_of(part, whole)


def format_usd(amount: Micros) -> str:
    """Two decimals, rounded up: `$7.97`. Below zero the sign comes first."""
    cents = -(-abs(amount) // 10_000)
    return f"{'-' if amount < 0 else ''}${cents // 100:,}.{cents % 100:02d}"


def format_figure(amount: Micros, figure: Figure) -> str:
    """The amount with what it is of the truth: `$7.97`, `≤$7.97` at most, `≥$7.97` at least."""
    return {Figure.BOUND: "≤", Figure.FLOOR: "≥"}.get(figure, "") + format_usd(amount)


def figure_words(amount: Micros, figure: Figure) -> str:
    """The same in a sentence: `$7.97`, `at most $7.97`, `at least $7.97`."""
    return {Figure.BOUND: "at most ", Figure.FLOOR: "at least "}.get(figure, "") + format_usd(amount)


def format_left(amount: Micros) -> str:
    """What remains, rounded down, so that nothing is left that is not there: `$0.00` for half a cent."""
    return format_usd(Micros(amount // 10_000 * 10_000))


def format_exact_usd(amount: Micros) -> str:
    """As many decimals as the amount has, two at least: `$0.005`, `$12.50`. For the marks of an axis."""
    whole, micros = divmod(abs(amount), MICROS_PER_USD)
    decimals = f"{micros:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if amount < 0 else ''}${whole:,}.{decimals}"


def format_rate(rate_per_hour: Micros) -> str:
    """An hourly rate with two decimals, rounded up: `$2.49/h`."""
    return f"{format_usd(rate_per_hour)}/h"
