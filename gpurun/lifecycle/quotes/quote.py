"""What a paid run would be on each offer, live or from the catalogue, ranked by the dollars that finishing takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.core.clock import local_time
from gpurun.core.errors import NoOffer, SetupError, UsageError
from gpurun.core.model import GpuNeed, Offer
from gpurun.core.money import format_usd, usd
from gpurun.core.plan import Candidate, DataSummary, Mode, Plan, Request
from gpurun.lifecycle.corpus.shards import BUILT_IN, read_manifest
from gpurun.lifecycle.quotes.market import Market
from gpurun.planning.budget import candidates, choose, ranked
from gpurun.planning.catalog import all_offers, counts_of, offers_for, parse_gpu
from gpurun.planning.estimate import NO_PRIORS
from gpurun.planning.load import BUCKET_BITS_PER_S, Load, load_of
from gpurun.planning.priors import Priors
from gpurun.planning.recipe import ResolvedRecipe, parameters_of
from gpurun.planning.software import images_by_provider, outfitted

# Shards that are not there yet are counted as pulled from a bucket; a home line would be the whole bill.
BYTES_PER_TOKEN = 2
VOCABULARIES = {"gpt2": 50257, "bpe": 8192, "char": 128, "char-pairs": 128, "word-pairs": 32_000}
DEFAULT_TEXT_MB = 32
WEAK = "needs --accept-weak-lease"
_CONSENT = "Add --lambda-guard (puts a key on the machine that ends it), or --accept-weak-lease."


@dataclass(frozen=True)
class Quote:
    """The offers for a need, what would have to travel, and what should be said about it."""

    candidates: tuple[Candidate, ...]
    load: Load
    notes: tuple[str, ...]
    read_wall: float = 0.0


def quote(
    request: Request,
    full: ResolvedRecipe,
    market: Market | None = None,
    data: DataSummary | None = None,
    priors: Priors = NO_PRIORS,
) -> Quote:
    """Judge the offers: the market's, or without one the catalogue's; NoOffer when there are none for the need.

    `data` are the shards that will be shipped; without them their size is guessed. `priors` are the user's own runs.
    """
    need = need_of(request, full)
    load, notes = _load(request, full, data)
    offers = _catalogued(request, need) if market is None else _live(market, need)
    found = candidates(
        offers,
        full,
        load,
        cap=request.max_cost_micros,
        hours=request.hours,
        vocab_size=data.vocab_size if data else _vocabulary(full),
        priors=priors,
        data_sha256=data.sha256 if data else "",
    )
    if not request.choices.weak_lease:
        found = tuple(sorted((_unless_weak(one) for one in found), key=lambda one: one.why_not == WEAK))
    return Quote(found, load, (*_price_notes(offers, market), *notes), market.read_wall if market else 0.0)


def elsewhere(request: Request, full: ResolvedRecipe, quoted: Quote, priors: Priors) -> Quote:
    """The same quote with all that the catalogue has beside the recipe's own GPU, ranked together.

    A machine without a GPU is among them only where the recipe is trained on one as it is written.
    """
    need, on_cpu = need_of(request, full), full.tables.hardware.on_cpu == "as_written"
    own = offers_for(need)
    others = [one for one in all_offers() if one not in own and (one.gpu_count or on_cpu)]
    asked = [one for one in others if not request.providers or one.provider in request.providers]
    region = request.choices.region
    asked = [one for one in asked if region is None or one.region in (region, "any")]
    vocab, cap = _vocabulary(full), request.max_cost_micros
    found = candidates(asked, full, quoted.load, cap=cap, hours=request.hours, vocab_size=vocab, priors=priors)
    if not request.choices.weak_lease:
        found = tuple(_unless_weak(one) for one in found)
    together = sorted(ranked((*quoted.candidates, *found)), key=lambda one: one.why_not == WEAK)
    note = f"Every offer of the catalogue is shown; without --gpu, `train` takes the recipe's {need}."
    return replace(quoted, candidates=tuple(together), notes=(*quoted.notes, note))


def need_of(request: Request, full: ResolvedRecipe) -> GpuNeed:
    """The GPUs that were asked for, or those that the recipe is written for."""
    return request.gpu or parse_gpu(full.tables.hardware.gpu)


def is_weak(offer: Offer) -> bool:
    """Whether nothing but this laptop ends the machine; a box that the user has is the user's own to end."""
    return offer.dies_by_itself.startswith("NO") and offer.provider != "ssh"


def _unless_weak(candidate: Candidate) -> Candidate:
    """The candidate; one that dies only by this laptop's hand may not be rented without being asked for."""
    if candidate.lease is None or not is_weak(candidate.offer):
        return candidate
    return candidate.model_copy(update={"lease": None, "finishes": False, "worst_micros": None, "why_not": WEAK})


def _price_notes(offers: Sequence[Offer], market: Market | None) -> tuple[str, ...]:
    """Where the prices are from, and who could not be asked."""
    if market is None:
        source = offers[0].price_source.split(" (")[0]
        return (f"Prices are from the packaged {source}; the live price is what counts.",)
    silent = (f"{name} could not be asked: {why}" for name, why in market.silent)
    packaged = {f"{o.provider}: price from the {o.price_source}." for o in offers if o.price_source.startswith("catal")}
    read = f"Prices were read live at {local_time(market.read_wall, now=market.read_wall)}."
    return (read, *sorted(packaged), *silent)


def _live(market: Market, need: GpuNeed) -> list[Offer]:
    """The market's offers; NoOffer when there is nothing, with what each silent provider said."""
    if market.offers:
        return list(market.offers)
    silent = " ".join(f"{name} could not be asked: {why}" for name, why in market.silent)
    if market.asked and len(market.silent) == len(market.asked):
        hint = "Check the network, then `gpurun doctor --online`. Rehearse meanwhile: add --dry-run."
        raise SetupError("market.unreachable", f"No cloud could be asked what it has. {silent}", hint=hint)
    sold = ", ".join(f"{count}x{need.name}" for count in counts_of(need, market.asked)) if need.count else ""
    asked = ", ".join(market.asked)
    raise NoOffer(
        "offer.no_capacity",
        f"Of those asked ({asked}) nobody has {need} now, in that region and kind. {silent}".strip(),
        hint=f"Sold there as {sold}. `gpurun offers` shows what there is." if sold else "`gpurun offers` shows more.",
    )


def _catalogued(request: Request, need: GpuNeed) -> list[Offer]:
    """The catalogue's offers that the request leaves."""
    clouds = [name for name in request.providers if name != "local"]
    offers = [offer for offer in offers_for(need) if not clouds or offer.provider in clouds]
    if not offers:
        sold = ", ".join(f"{count}x{need.name}" for count in counts_of(need, clouds))
        what = f"{' and '.join(clouds)} has no {need}" if clouds else f"No provider in the catalogue has {need}"
        raise NoOffer("offer.none", f"{what}.", hint=f"Sold as {sold}." if sold else "Try another --gpu or provider.")
    region = request.choices.region
    here = [offer for offer in offers if region is None or offer.region in (region, "any")]
    if not here:
        regions = ", ".join(sorted({offer.region for offer in offers}))
        hint = f"The catalogue has: {regions}."
        raise NoOffer("offer.no_region", f"{need} is not offered in {region!r}.", hint=hint)
    return here


def _bytes_of(data: str) -> int:
    """How much lies at the place that --data names; of a parallel text that may be two files with a comma between."""
    places = [Path(data).expanduser()]
    if not places[0].exists():
        places = [Path(one).expanduser() for one in data.split(",")]
    for place in places:
        if not place.exists():
            raise UsageError("data.missing", f"{place} is not there.", hint="Check the path that --data names.")
    files = [path for place in places for path in [place, *place.rglob("*")] if path.is_file()]
    return sum(path.stat().st_size for path in files)


def _load(request: Request, full: ResolvedRecipe, data: DataSummary | None) -> tuple[Load, tuple[str, ...]]:
    """What a paid run would move; shards that do not exist yet are counted from a bucket, and that is said."""
    train, source = full.tables.train, full.tables.data.source
    carried = full.earlier.bytes if full.earlier else 0
    if data is not None:
        load = load_of(full, data.bytes, vocab_size=data.vocab_size)
        if request.choices.stage:
            from gpurun.lifecycle.bucket.planned import staged_uplink_bits_per_s

            load = replace(load, uplink_bits_per_s=staged_uplink_bits_per_s(Path(data.folder), data.bytes))
        return load, ()
    if request.data is not None:
        return load_of(full, carried + _bytes_of(request.data), vocab_size=_vocabulary(full)), ()
    if source in BUILT_IN:
        size = carried + ((full.tables.data.limit_mb or DEFAULT_TEXT_MB) << 20)
        return load_of(full, size, vocab_size=_vocabulary(full)), ()
    size = carried + train.steps * train.batch_tokens * BYTES_PER_TOKEN
    plain = load_of(full, size, vocab_size=_vocabulary(full))
    load = Load(size, plain.collect_bytes, plain.disk_gb, uplink_bits_per_s=BUCKET_BITS_PER_S)
    note = (
        f"The shards of {source} (about {size / 1e9:.0f} GB) are not here yet. They are counted as pulled from a "
        f"bucket in {load.ship_s / 60:.0f} min; sent over a 20 Mbit/s line they would take {plain.ship_s / 3600:.1f} h."
    )
    return load, (note,)


def paid_plan(request: Request, run: str, full: ResolvedRecipe, quoted: Quote, data: DataSummary | None = None) -> Plan:
    """The plan of the best offer that the cap pays for; NoOffer says what would do when there is none."""
    _refuse_only_weak(quoted, request)
    chosen = _chosen(request, quoted)
    if chosen.lease is None:
        raise RuntimeError(f"{chosen.offer.label} was chosen without a lease")
    choices, said = outfitted(full.tables, chosen.offer.provider, request.choices)
    return Plan(
        run=run,
        mode=Mode.PAID,
        recipe=full.name,
        form=full.form,
        recipe_sha256=full.sha256,
        resolved=full.record,
        parameters=parameters_of(full.tables.model, data.vocab_size if data else _vocabulary(full)),
        processes=chosen.offer.gpu_count or 1,
        offer=chosen.offer,
        estimate=chosen.estimate,
        lease=chosen.lease,
        cap_micros=request.max_cost_micros,
        expected_micros=chosen.expected_micros or usd(0),
        worst_micros=chosen.worst_micros or usd(0),
        candidates=quoted.candidates,
        data=data or _not_prepared(request, full, quoted.load.ship_bytes),
        bundle_sha256="",
        ship_files=0,
        ship_bytes=quoted.load.ship_bytes,
        notes=(*quoted.notes, *said),
        choices=choices,
        images=images_by_provider(full.tables, {one.offer.provider for one in quoted.candidates}, request.choices),
        continues=full.earlier,
        quoted_wall=quoted.read_wall,
    )


def _chosen(request: Request, quoted: Quote) -> Candidate:
    """The best offer that the cap pays for; a refusal names a cap that would do, with what else that takes."""
    strong = [one for one in quoted.candidates if request.choices.weak_lease or not is_weak(one.offer)]
    try:
        return choose(strong or quoted.candidates, quoted.load, cap=request.max_cost_micros)
    except NoOffer as refusal:
        if strong or refusal.code != "offer.over_cap":
            raise
        hint = f"{refusal.hint} Nothing on that machine ends it, whatever the cap. {_CONSENT}"
        raise NoOffer(refusal.code, refusal.what, hint=hint) from None


def _refuse_only_weak(quoted: Quote, request: Request) -> None:
    """Say it where only machines that nothing ends by itself could be rented."""
    if any(one.lease is not None for one in quoted.candidates):
        return
    weak = [one for one in quoted.candidates if one.why_not == WEAK]
    if weak:
        first = weak[0]
        price = format_usd(first.expected_micros) if first.expected_micros is not None else "an unknown sum"
        raise NoOffer(
            "offer.weak_lease",
            f"Only {first.offer.provider} can run this under the cap ({first.offer.label}, about {price}), and nothing "
            "on that machine ends it: if this laptop is lost, it goes on billing.",
            hint=_CONSENT,
        )


def _not_prepared(request: Request, full: ResolvedRecipe, size: int) -> DataSummary:
    """Data that is only spoken of; of shards that were brought, what their manifest says."""
    data, train = full.tables.data, full.tables.train
    source, train_tokens = f"{data.source} (not prepared)", train.steps * train.batch_tokens
    if request.data is not None:
        place = Path(request.data).expanduser()
        shards = read_manifest(place)["train"] if (place / "data.json").exists() else []
        state = "not checked" if shards else "not prepared"
        source, train_tokens = f"{request.data} ({state})", sum(shard["tokens"] for shard in shards)
    return DataSummary(
        folder="",
        tokenizer=data.tokenizer,
        tokenizer_sha256="",
        vocab_size=_vocabulary(full),
        train_tokens=train_tokens,
        val_tokens=0,
        bytes=size,
        sha256="",
        source=source,
    )


def _vocabulary(full: ResolvedRecipe) -> int:
    """The recipe's vocabulary; where only the text will tell, what Python source gives, or the most words there are."""
    data = full.tables.data
    return full.tables.model.vocab_size or data.vocab_size or VOCABULARIES[data.tokenizer]
