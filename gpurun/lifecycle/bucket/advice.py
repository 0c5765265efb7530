"""What a plan without a bucket says of a long upload; it imports little, as `gpurun plan` should answer at once."""

from __future__ import annotations

from math import ceil

from gpurun.core.money import cost_of, format_usd, times
from gpurun.core.plan import Mode, Plan
from gpurun.planning.catalog import terms_of
from gpurun.planning.load import BUCKET_BITS_PER_S, UPLINK_BITS_PER_S, WORTH_A_BUCKET_S


def advice(plan: Plan, size_bytes: int) -> tuple[str, ...]:
    """What would save the paid time of sending so many bytes of shards; nothing where that is little."""
    saved_s = 8 * size_bytes / UPLINK_BITS_PER_S - 8 * size_bytes / BUCKET_BITS_PER_S
    if plan.mode is not Mode.PAID or not plan.offer.rate_micros_per_hour or saved_s < WORTH_A_BUCKET_S:
        return ()
    dollars = format_usd(cost_of(plan.offer.rate_micros_per_hour, saved_s, 1))
    what = f"Sending the shards over {UPLINK_BITS_PER_S / 1e6:.0f} Mbit/s takes {saved_s / 60:.0f} min of the rental"
    is_charged = plan.offer.provider != "aws"
    bill = f" (AWS bills what leaves a bucket of its own: {aws_bill(size_bytes)})" if is_charged else ""
    return (f"{what} more than a bucket would, {dollars}: add --stage s3://BUCKET/PREFIX{bill}, or take fewer shards.",)


def aws_bill(size_bytes: int) -> str:
    """What AWS charges for bytes that leave it, in dollars."""
    return format_usd(times(terms_of("aws").egress_per_gb, ceil(size_bytes / 1e9)))
