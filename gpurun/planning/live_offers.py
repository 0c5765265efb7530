"""Read the live offers of several providers at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import NoReturn

from gpurun.core.clock import Clock
from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.money import Micros, format_rate
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Offer
from gpurun.core.run_plan import Choices
from gpurun.planning.market import Market
from gpurun.providers.base import HasRegions, KeyEnds, Unknown, clock_warning
from gpurun.providers.catalog import rows_for
from gpurun.providers.errors import no_such_region
from gpurun.providers.registry import open_provider


def live_offers(need: GpuNeed, names: Sequence[str], home: Home, clock: Clock, choices: Choices) -> Market:
    """Query these clouds for offers that match a request, in all regions or the chosen one.

    A cloud that cannot be queried is listed in `silent`; the other clouds' offers are kept. Raise SetupError if no
    cloud has an offer and a key was refused, UsageError if no cloud has the region, and NoOffer if every offer is above
    --max-rate.
    """
    refused: list[SetupError] = []
    warnings: list[str] = []
    elsewhere: dict[str, tuple[str, ...]] = {}
    keys_end_wall: dict[str, float] = {}

    def ask(name: str) -> list[Offer] | str:
        try:
            provider = open_provider(name, home, clock, choices)
            if choices.region and isinstance(provider, HasRegions):
                regions = provider.regions()
                if choices.region not in regions:
                    elsewhere[name] = regions
                    return []
            offers = provider.offers(need, rows_for(need, name))
            warnings.extend(clock_warning(provider))
            if isinstance(provider, KeyEnds) and (ends_wall := provider.key_ends_wall()) != inf:
                keys_end_wall[name] = ends_wall
            return offers
        except Unknown as error:
            return str(error)
        except SetupError as error:
            refused.append(error)
            return f"{error.what} {error.hint}"

    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        answers = dict(zip(names, pool.map(ask, names), strict=True))
    offers = [offer for answer in answers.values() if not isinstance(answer, str) for offer in answer]
    if refused and not offers:
        raise refused[0]
    if choices.region and elsewhere and len(elsewhere) == len(names):
        raise no_such_region(choices.region, elsewhere)
    silent = tuple((name, answer) for name, answer in answers.items() if isinstance(answer, str))
    most = choices.max_rate_micros
    fitting = [offer for offer in offers if offer.spot == choices.spot]
    if most is not None and fitting:
        fitting = [offer for offer in fitting if offer.rate_micros_per_hour <= most] or _raise_over_rate(most, fitting)
    if choices.region is not None:  # An offer that is valid in any region becomes an offer for this region.
        here = {"region": choices.region}
        fitting = [offer.model_copy(update=here) for offer in fitting if offer.region in (choices.region, "any")]
    return Market(tuple(fitting), silent, clock.wall(), tuple(names), tuple(sorted(warnings)), keys_end_wall)


def _raise_over_rate(most: Micros, offers: Sequence[Offer]) -> NoReturn:
    """Raise NoOffer, because every offer costs more per hour than --max-rate allows."""
    best = min(offers, key=lambda offer: offer.rate_micros_per_hour)
    what = f"Nothing on offer costs at most {format_rate(most)}: the cheapest is {best.provider} {best.label}"
    rate = format_rate(best.rate_micros_per_hour)
    raise NoOffer("offer.over_rate", f"{what}, {rate}.", hint="Raise --max-rate, or ask for another --gpu.")
