"""What was agreed to, held against what is on sale and what was made: price, machine type, number of GPUs, region."""

from __future__ import annotations

from gpurun.core.clock import Clock
from gpurun.core.errors import NoOffer
from gpurun.core.model import GpuNeed, Instance
from gpurun.core.money import Micros, format_rate, format_usd
from gpurun.core.plan import Plan
from gpurun.planning.budget import rental_cost
from gpurun.planning.catalog import cards, rows_for
from gpurun.providers.base import Provider, Unknown

STALE_S = 600.0


def check_price(plan: Plan, provider: Provider, clock: Clock) -> None:
    """Before anything is asked for: refuse a price that has risen, or one that is old and cannot be read again.

    A price read in the last ten minutes stands. An offer that is not on sale any more is for the provider to refuse.
    """
    if not plan.quoted_wall or 0 <= clock.wall() - plan.quoted_wall <= STALE_S:
        return
    agreed = plan.offer
    need = GpuNeed(count=agreed.gpu_count, name=_card(agreed.gpu), memory_gb=agreed.vram_gb or None)
    try:
        offers = provider.offers(need, rows_for(need, agreed.provider))
    except Unknown as error:
        raise NoOffer(
            "price.unknown",
            f"The price is more than {STALE_S / 60:.0f} min old, and cannot be read again: {error}.",
            hint="Nothing was made. Try again, or another --provider.",
        ) from error
    same = [
        offer.rate_micros_per_hour
        for offer in offers
        if (offer.type_id, offer.tier, offer.spot) == (agreed.type_id, agreed.tier, agreed.spot)
        and offer.region in (agreed.region, "any")
    ]
    if same and min(same) > agreed.rate_micros_per_hour:
        raise rose(plan, min(same), "Nothing was made.")


def check_made(instance: Instance, plan: Plan) -> None:
    """Refuse an instance that costs more than was agreed to, is another or elsewhere; the driver destroys it."""
    rate = instance.rate_micros_per_hour
    if rate is not None and costs_more(instance, plan):
        raise rose(plan, rate, "It is being destroyed.")
    if is_another(instance, plan):
        kind = instance.type_id or instance.gpu or "?"
        raise NoOffer(
            "gpu.other",
            f"It is {instance.gpu_count or '?'}×{kind}, not the {plan.offer.label} agreed to.",
            hint="It is being destroyed. Run the plan again, or choose another --provider.",
        )
    if is_elsewhere(instance, plan):
        raise NoOffer(
            "region.other",
            f"It stands in {instance.region}, not in {plan.offer.region} as was agreed to.",
            hint="It is being destroyed, and nothing was sent there. Try again, or another --region or --provider.",
        )


def is_told_otherwise(instance: Instance, born: Instance, plan: Plan) -> bool:
    """Whether the provider says only now that what it made is not what was agreed to."""
    now, before = (
        (one.rate_micros_per_hour, one.type_id, one.gpu, one.gpu_count, one.region) for one in (instance, born)
    )
    is_wrong = costs_more(instance, plan) or is_another(instance, plan) or is_elsewhere(instance, plan)
    return now != before and instance.token == born.token and is_wrong


def costs_more(instance: Instance, plan: Plan) -> bool:
    """Whether it is told to cost more than was agreed to."""
    rate = instance.rate_micros_per_hour
    return rate is not None and rate > plan.offer.rate_micros_per_hour


def is_another(instance: Instance, plan: Plan) -> bool:
    """Whether it is not the machine of the offer; what a provider does not tell is not held against it."""
    offer = plan.offer
    return (
        (bool(instance.type_id) and instance.type_id != offer.type_id)
        or (bool(instance.gpu) and instance.gpu != offer.gpu)
        or (bool(instance.gpu_count) and instance.gpu_count != offer.gpu_count)
    )


def is_elsewhere(instance: Instance, plan: Plan) -> bool:
    """Whether it stands in another region than the one that was named; where it stands may be told late, or never."""
    return bool(instance.region) and plan.offer.region not in ("", "any", instance.region)


def rose(plan: Plan, rate: Micros, outcome: str) -> NoOffer:
    """The refusal of a price, with the worst case that it would mean."""
    lease, dearer = plan.lease, plan.offer.model_copy(update={"rate_micros_per_hour": rate})
    disk_gb = int(plan.resolved["hardware"]["disk_gb"])
    worst = rental_cost(dearer, lease.total_s + lease.kill_allowance_s, plan.parameters, disk_gb)
    return NoOffer(
        "price.rose",
        f"The instance costs {format_rate(rate)}, not the {format_rate(plan.offer.rate_micros_per_hour)} agreed to.",
        hint=f"{outcome} At the new price the worst case is {format_usd(worst)}; run the plan again.",
    )


def _card(gpu: str) -> str:
    """The name that --gpu takes for the card of an offer."""
    return cards()[gpu].name if gpu in cards() else gpu
