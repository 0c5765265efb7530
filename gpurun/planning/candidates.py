"""Judge and rank the offers for a paid run by the cost of finishing. They are live, or from the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpurun.core.clock import local_time
from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.money import format_usd
from gpurun.core.records import GpuNeed, Offer
from gpurun.core.run_plan import Candidate, DataSummary, Request
from gpurun.core.uplink import Uplink
from gpurun.jobs.requirements import choose_setup_limit_s
from gpurun.jobs.training.estimate import NO_PRIORS
from gpurun.jobs.training.history import Priors, uplink_of
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.planning.budget import candidates, choose, ranked
from gpurun.planning.transfer import Load, load_for, named_data, vocabulary_of
from gpurun.providers.catalog import catalogue_offers, catalogue_words, counts_of, list_alternatives, parse_gpu

if TYPE_CHECKING:
    from gpurun.planning.market import Market
    from gpurun.planning.place import Place

WEAK = "needs --accept-weak-lease"
_ASSUMED_CARD = "A100"
"""The GPU that a user's box is assumed to have without --gpu. The box is checked before anything is sent."""
_CONSENT = "Add --lambda-guard (puts a key on the machine so that it can end itself), or --accept-weak-lease."


@dataclass(frozen=True)
class Quote:
    """The judged offers for a request, what must be transferred, and notes for the plan."""

    candidates: tuple[Candidate, ...]
    load: Load
    uplink: Uplink
    notes: tuple[str, ...]
    queried: tuple[str, ...] | None = None
    """The clouds whose prices were read live; None if all prices are from the catalogue."""


def quote(
    request: Request,
    full: ResolvedRecipe,
    place: Place,
    market: Market | None,
    data: DataSummary | None = None,
    priors: Priors = NO_PRIORS,
) -> Quote:
    """Judge the market's offers, or without a market the catalogue's. Raise NoOffer if none matches the request.

    `data` are the shards to upload; without them their size is estimated. `priors` are the user's own runs. If a plan
    is only shown and no GPU was requested, it is enough that some other GPU than the recipe's own has an offer.
    """
    need = need_of(request, full, is_rented=place.is_rented)
    uplink = uplink_of(request, priors)
    load, notes = load_for(request, full, data, uplink)
    load = replace(load, setup_s=choose_setup_limit_s(full.tables, request.choices, is_outfitted=place.is_outfitted))
    try:
        offers = catalogue_offers(request, need) if market is None else on_sale(market, need)
    except NoOffer as none:
        if (
            not place.is_shown
            or request.gpu is not None
            or not list_alternatives(request, need, on_cpu=_may_train_on_cpu(full))
        ):
            raise
        offers, notes = [], (f"{none.what} {none.hint}", *notes)
    found = candidates(
        offers,
        full,
        load,
        cap=place.cap,
        hours=request.hours,
        vocab_size=data.vocab_size if data else vocabulary_of(full),
        cpu_cores=place.cpu_cores,
        priors=priors,
        data_sha256=data.sha256 if data else named_data(request),
    )
    if not place.is_rented:
        return Quote(found, load, uplink, ())
    if not request.choices.weak_lease:
        found = tuple(sorted((unless_weak(each) for each in found), key=lambda each: each.needs_consent))
    queried = market.queried if market else None
    return Quote(found, load, uplink, (*price_notes(request, offers, market), *notes), queried)


def quote_other_gpus(request: Request, full: ResolvedRecipe, place: Place, quoted: Quote, priors: Priors) -> Quote:
    """Return the quote together with the catalogue's offers of other GPUs, all ranked together.

    Machines without a GPU are included only if the recipe trains on a CPU as it is written.
    """
    need = need_of(request, full, is_rented=True)
    vocab = vocabulary_of(full)
    cap = place.cap
    beside = list_alternatives(request, need, on_cpu=_may_train_on_cpu(full), queried=quoted.queried)
    found = candidates(
        beside,
        full,
        quoted.load,
        cap=cap,
        hours=request.hours,
        vocab_size=vocab,
        priors=priors,
        data_sha256=named_data(request),
    )
    if not request.choices.weak_lease:
        found = tuple(unless_weak(each) for each in found)
    together = sorted(ranked((*quoted.candidates, *found), quoted.load), key=lambda each: each.needs_consent)
    taken = "takes the best offer" if need.is_any else f"uses the recipe's {need}"
    note = f"Every offer in the catalogue is ranked; without --gpu, `train` {taken}."
    if quoted.queried is not None:
        note += f" Only the prices from {' and '.join(quoted.queried)} are live; others are the {catalogue_words()}'s"
        note += ", for on-demand machines." if request.choices.spot else "."
    return replace(quoted, candidates=tuple(together), notes=(*quoted.notes, note))


def _may_train_on_cpu(full: ResolvedRecipe) -> bool:
    """Return whether the recipe trains as it is written on a machine without a GPU."""
    return full.tables.hardware.on_cpu == "as_written"


def need_of(request: Request, full: ResolvedRecipe, *, is_rented: bool) -> GpuNeed:
    """Return the requested GPUs, or those that the recipe is written for."""
    need = request.gpu or parse_gpu(full.tables.hardware.gpu)
    return need.model_copy(update={"name": _ASSUMED_CARD}) if need.is_any and not is_rented else need


def is_weak(offer: Offer) -> bool:
    """Return whether only this computer would end the rented machine."""
    return offer.dies_by_itself.startswith("NO")


def unless_weak(candidate: Candidate) -> Candidate:
    """Return the candidate, without its lease if only this computer would end the machine (renting it needs a flag).

    The reason names the missing flag before a cap that is too low, because a higher cap alone would not be enough.
    """
    if not is_weak(candidate.offer) or not candidate.estimate.fits:
        return candidate
    update = {"lease": None, "finishes": False, "worst_micros": None, "needs_consent": True}
    if candidate.lease is not None:
        return candidate.model_copy(update={**update, "why_not": WEAK, "obstacle": "consent"})
    return candidate.model_copy(update={**update, "why_not": f"{WEAK}; {candidate.why_not}"})


def price_notes(request: Request, offers: Sequence[Offer], market: Market | None) -> tuple[str, ...]:
    """Return notes about the source of the prices."""
    if market is None:
        note = f"Prices are from the {catalogue_words()}; the live price is what counts."
        kind = " It has no spot prices: these are for on-demand machines." if request.choices.spot else ""
        return (note + kind,)
    packaged = {f"{o.provider}: price from the {o.price_source}." for o in offers if o.price_source.startswith("catal")}
    read = f"Prices were read live at {local_time(market.read_wall, now=market.read_wall)}."
    return (read, *sorted(packaged))


def on_sale(market: Market, need: GpuNeed) -> list[Offer]:
    """Return the market's offers. If there are none, raise NoOffer, or SetupError if no cloud could be queried."""
    if market.offers:
        return list(market.offers)
    silent = " ".join(f"{name} could not be queried: {why}" for name, why in market.silent)
    if market.queried and len(market.silent) == len(market.queried):
        hint = "Check the network, then `gpurun doctor --online`. Rehearse meanwhile: add --dry-run."
        raise SetupError("market.unreachable", f"No cloud could be queried for its offers. {silent}", hint=hint)
    sold = ", ".join(f"{count}x{need.name}" for count in counts_of(need, market.queried)) if need.count else ""
    clouds = ", ".join(market.queried)
    raise NoOffer(
        "offer.no_capacity",
        f"None of the queried clouds ({clouds}) has {need} now, with this region and kind. {silent}".strip(),
        hint=f"Sold there as {sold}. `gpurun offers` shows what there is." if sold else "`gpurun offers` shows more.",
    )


def choose_best(quoted: Quote, request: Request, *, by_gpu: bool = False) -> Candidate:
    """Return the best offer that the cap pays for. Otherwise raise NoOffer, whose hint names a sufficient cap.

    With `by_gpu` the hint includes --gpu, because the offers have other GPUs than the recipe's own.
    """
    _require_strong_lease(quoted, request)
    strong = [each for each in quoted.candidates if request.choices.weak_lease or not is_weak(each.offer)]
    try:
        return choose(strong or quoted.candidates, quoted.load, cap=request.max_cost_micros, by_gpu=by_gpu)
    except NoOffer as refusal:
        if strong or refusal.code != "offer.over_cap":
            raise
        hint = f"{refusal.hint} Whatever the cap, that machine cannot end itself. {_CONSENT}"
        raise NoOffer(refusal.code, refusal.what, hint=hint) from None


def _require_strong_lease(quoted: Quote, request: Request) -> None:
    """Raise NoOffer if the cap pays only for machines that only this computer would end."""
    if any(candidate.lease is not None for candidate in quoted.candidates):
        return
    weak = [candidate for candidate in quoted.candidates if candidate.obstacle == "consent"]
    if weak:
        first = weak[0]
        price = format_usd(first.expected_micros) if first.expected_micros is not None else "an unknown sum"
        under = " under the cap" if request.max_cost_micros is not None else ""
        raise NoOffer(
            "offer.weak_lease",
            f"Only {first.offer.provider} can run this{under} ({first.offer.label}, about {price}), and that "
            "machine cannot end itself: if this computer is lost, billing continues.",
            hint=_CONSENT,
        )
