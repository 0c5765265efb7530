"""What the packaged catalogue has for a request: where no cloud was asked, and beside what one was asked for."""

from __future__ import annotations

from collections.abc import Collection

from gpurun.core.errors import NoOffer
from gpurun.core.model import GpuNeed, Offer
from gpurun.core.plan import Request
from gpurun.planning.catalog import all_offers, counts_of, offers_for, terms_of

__all__ = ["CATALOGUE", "catalogued", "others"]

CATALOGUE = f"packaged {all_offers()[0].price_source.split(' (')[0]}"
"""Which one it is, in words."""


def catalogued(request: Request, need: GpuNeed) -> list[Offer]:
    """The catalogue's offers for a need that the request leaves; NoOffer when there are none."""
    clouds = _clouds(request)
    offers = [offer for offer in offers_for(need) if not clouds or offer.provider in clouds]
    if not offers:
        sold = ", ".join(f"{count}x{need.name}" for count in counts_of(need, clouds))
        what = f"{' and '.join(clouds)} has no {need}" if clouds else f"No provider in the catalogue has {need}"
        raise NoOffer("offer.none", f"{what}.", hint=f"Sold as {sold}." if sold else "Try another --gpu or provider.")
    here = _left(offers, request)
    if not here:
        regions = ", ".join(sorted({offer.region for offer in offers}))
        hint = f"The catalogue has: {regions}."
        raise NoOffer("offer.no_region", f"{need} is not offered in {request.choices.region!r}.", hint=hint)
    return here


def others(request: Request, need: GpuNeed, *, on_cpu: bool, asked: Collection[str] | None = None) -> list[Offer]:
    """What else the catalogue has: other GPUs, and of the need itself what clouds have that were not `asked`.

    A machine without a GPU is among them only with `on_cpu`.
    """
    own = {offer for offer in offers_for(need) if asked is None or offer.provider in asked}
    return _left([one for one in all_offers() if one not in own and (one.gpu_count or on_cpu)], request)


def _clouds(request: Request) -> list[str]:
    return [name for name in request.providers if name != "local"]


def _left(offers: list[Offer], request: Request) -> list[Offer]:
    """Those at a cloud and in a region of the request, with who ends them under the user's choices."""
    clouds, region = _clouds(request), request.choices.region
    here = [one for one in offers if not clouds or one.provider in clouds]
    here = [one for one in here if region is None or one.region in (region, "any")]
    # Types that differ in nothing but their name are one offer to choose from, the first.
    found: dict[tuple[object, ...], Offer] = {}
    for one in here:
        found.setdefault((one.provider, one.label, one.place, one.rate_micros_per_hour), one)
    return [_guarded(one, request) for one in found.values()]


def _guarded(offer: Offer, request: Request) -> Offer:
    """The offer, ended by the key on it where the user wants one there and the cloud takes it."""
    words = terms_of(offer.provider).with_guard if request.choices.guard else ""
    return offer.model_copy(update={"dies_by_itself": words}) if words else offer
