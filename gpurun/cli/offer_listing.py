"""Lists live prices of each cloud with a key; without keys, lists the packaged catalogue's prices and says so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.cli.session import Session
from gpurun.core.clock import local_time
from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.money import Micros, format_rate
from gpurun.core.records import GpuNeed, Offer
from gpurun.core.run_plan import Choices
from gpurun.planning.live_offers import live_offers
from gpurun.planning.market import Market
from gpurun.providers.catalog import all_offers, counts_of, offers_for
from gpurun.providers.registry import CLOUDS, OVERRIDES, ready_providers

_CATALOGUE = "catalogue"


@dataclass(frozen=True)
class OfferListing:
    """Offers, with `notes`, and `warnings` about prices that are not live and keys that go to another address.

    `if_none` is the message for an empty list. `read_wall` is None for the catalogue; `unreached` means that no cloud
    responded.
    """

    offers: Sequence[Offer]
    notes: Sequence[str]
    warnings: Sequence[str]
    if_none: str
    silent: Sequence[tuple[str, str]] = ()
    read_wall: float | None = None
    unreached: bool = False


def list_offers(session: Session, need: GpuNeed | None, clouds: Sequence[str], choices: Choices) -> OfferListing:
    """Return live offers of the clouds with a key; if there is no key, the catalogue's offers of all clouds."""
    if need is None:
        return _list_catalog_offers(None, clouds, choices, "Name a GPU to see live prices.")
    ready = [name for name in ready_providers(session.home) if name in clouds]
    if not ready:
        whose = " or ".join(clouds) if len(clouds) < len(CLOUDS) else "any cloud"
        return _list_catalog_offers(need, clouds, choices, f"There is no key for {whose}: gpurun auth set {clouds[0]}")
    if not session.json:
        session.say(f"Asking {', '.join(ready)} for {need}.")
    market = live_offers(need, ready, session.home, session.clock, choices)
    where = f" in {choices.region}" if choices.region else ""
    how = " on spot" if choices.spot else ""
    if_none = f"None of the clouds that were asked has {need}{how}{where} now."
    notes = _read_notes(market, [name for name in clouds if name not in ready], session)
    warnings, unreached = _live_warnings(market, ready), len(market.silent) == len(ready)
    return OfferListing(market.offers, notes, warnings, if_none, market.silent, market.read_wall, unreached)


def _read_notes(market: Market, keyless: Sequence[str], session: Session) -> list[str]:
    """Return notes: when prices were read, and which clouds were not asked."""
    at = local_time(market.read_wall, now=session.clock.wall())
    read = [f"Prices were read at {at}."] if market.offers else []
    return [*read, *([f"Not asked, because they have no key: {', '.join(keyless)}."] if keyless else [])]


def _live_warnings(market: Market, ready: Sequence[str]) -> list[str]:
    """Return warnings about prices that are not live, and keys that go to an address other than the cloud's."""
    sources = {(offer.provider, offer.price_source) for offer in market.offers}
    packaged = sorted((name, source) for name, source in sources if source.startswith(_CATALOGUE))
    found = [f"The prices of {name} are NOT LIVE: {source}." for name, source in packaged]
    for name, variable in OVERRIDES.items():
        if name in ready and os.environ.get(variable):
            found.append(f"{variable} is set: requests for {name} prices, with your key, go to {os.environ[variable]}.")
    return found


def _list_catalog_offers(need: GpuNeed | None, clouds: Sequence[str], choices: Choices, why: str) -> OfferListing:
    """Return the packaged catalogue's offers, with a warning that they are not live; it has no spot prices."""
    rows = [offer for offer in (offers_for(need) if need else all_offers()) if offer.provider in clouds]
    kept = [offer for offer in rows if choices.region in (None, offer.region) or offer.region == "any"]
    if choices.spot:
        return OfferListing((), [why], (), "The packaged catalogue has no spot prices.")
    if not kept:
        regions = ", ".join(sorted({offer.region for offer in rows}))
        where = f" in {choices.region}; only in {regions}" if rows else ""
        none = f"The packaged catalogue has no {need or 'offers'} from {' or '.join(clouds)}{where}."
        return OfferListing((), [why], (), none)
    dates = sorted({offer.price_source.split(" (")[0] for offer in kept})
    return OfferListing(kept, [why], [f"NOT LIVE: prices of the packaged {' and '.join(dates)}."], "")


def nothing_found(
    found: OfferListing, need: GpuNeed | None, clouds: Sequence[str], limit: Micros | None
) -> NoOffer | SetupError:
    """Return the error for an empty list: all offers are too expensive, no cloud responded, or nothing is for rent."""
    if found.unreached:
        hint = "Check the network, then: gpurun doctor --online"
        return SetupError("market.unreachable", "None of the clouds that have a key could be asked.", hint=hint)
    if found.offers and limit is not None:
        nothing = f"Nothing for {need}" if need else "Nothing"
        cheapest = min(offer.rate_micros_per_hour for offer in found.offers)
        return NoOffer(
            "offers.too_dear",
            f"{nothing} costs at most {format_rate(limit)}; the cheapest is {format_rate(cheapest)}.",
            hint="Raise --max-price, or use a smaller --gpu.",
        )
    counts = counts_of(need, clouds) if need and need.count else []
    sold = f"It is sold as {', '.join(f'{count}x{need.name}' for count in counts)}. " if need and counts else ""
    return NoOffer("offers.none", found.if_none, hint=f"{sold}To list all GPUs: gpurun offers --gpu any")
