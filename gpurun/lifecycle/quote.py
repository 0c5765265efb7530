"""What the paid run would be: every catalogue offer, judged and ranked by the dollars that finishing takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpurun.core.errors import NoOffer
from gpurun.core.model import Candidate, DataSummary, GpuNeed, Mode, Offer, Plan, Request
from gpurun.core.money import usd
from gpurun.planning.budget import Load, candidates, choose, load_of
from gpurun.planning.catalog import counts_of, offers_for, parse_gpu
from gpurun.planning.recipe import ResolvedRecipe, parameters_of

# Shards that are not there yet are counted as pulled from a bucket; a home line would be the whole bill.
BUCKET_BITS_PER_S = 1e9
BYTES_PER_TOKEN = 2
GPT2_VOCABULARY = 50257
CHARACTERS = 128
DEFAULT_TEXT_MB = 32


@dataclass(frozen=True)
class Quote:
    """The offers for a need, what would have to travel, and what should be said about it."""

    candidates: tuple[Candidate, ...]
    load: Load
    notes: tuple[str, ...]


def quote(request: Request, full: ResolvedRecipe) -> Quote:
    """Judge the catalogue's offers; NoOffer when it has none for the GPU, the providers or the region."""
    need = request.gpu or parse_gpu(full.tables.hardware.gpu)
    load, notes = _load(request, full)
    found = candidates(
        _offers(request, need),
        full,
        load,
        cap=request.max_cost_micros,
        hours=request.hours,
        vocab_size=_vocabulary(full),
    )
    priced = (
        f"Prices are from the packaged {found[0].offer.price_source.split(' (')[0]}; the live price is what counts."
    )
    return Quote(found, load, (priced, *notes))


def _offers(request: Request, need: GpuNeed) -> list[Offer]:
    """The offers that the request leaves."""
    clouds = [name for name in request.providers if name != "local"]
    offers = [offer for offer in offers_for(need) if not clouds or offer.provider in clouds]
    if not offers:
        sold = ", ".join(f"{count}x{need.name}" for count in counts_of(need, clouds))
        what = f"{' and '.join(clouds)} has no {need}" if clouds else f"No provider in the catalogue has {need}"
        raise NoOffer("offer.none", f"{what}.", hint=f"Sold as {sold}." if sold else "Try another --gpu or provider.")
    if request.region is None:
        return offers
    here = [offer for offer in offers if offer.region in (request.region, "any")]
    if not here:
        regions = ", ".join(sorted({offer.region for offer in offers}))
        hint = f"The catalogue has: {regions}."
        raise NoOffer("offer.no_region", f"{need} is not offered in {request.region!r}.", hint=hint)
    return here


def _load(request: Request, full: ResolvedRecipe) -> tuple[Load, tuple[str, ...]]:
    """What a paid run would move; shards that do not exist yet are counted from a bucket, and that is said."""
    train, source = full.tables.train, full.tables.data.source
    if request.data is not None and Path(request.data).exists():
        files = [path for path in [Path(request.data), *Path(request.data).rglob("*")] if path.is_file()]
        return load_of(full, sum(path.stat().st_size for path in files), vocab_size=_vocabulary(full)), ()
    if source == "stdlib":
        return load_of(full, (full.tables.data.limit_mb or DEFAULT_TEXT_MB) << 20, vocab_size=_vocabulary(full)), ()
    size = train.steps * train.batch_tokens * BYTES_PER_TOKEN
    plain = load_of(full, size, vocab_size=_vocabulary(full))
    load = Load(size, plain.collect_bytes, plain.disk_gb, uplink_bits_per_s=BUCKET_BITS_PER_S)
    note = (
        f"The shards of {source} (about {size / 1e9:.0f} GB) are not here yet. They are counted as pulled from a "
        f"bucket in {load.ship_s / 60:.0f} min; sent over a 20 Mbit/s line they would take {plain.ship_s / 3600:.1f} h."
    )
    return load, (note,)


def paid_plan(request: Request, run: str, full: ResolvedRecipe, quoted: Quote) -> Plan:
    """The plan of the best offer that the cap pays for; NoOffer names the cap that would do when there is none."""
    chosen = choose(quoted.candidates, quoted.load, cap=request.max_cost_micros)
    if chosen.lease is None:
        raise RuntimeError(f"{chosen.offer.label} was chosen without a lease")
    return Plan(
        run=run,
        mode=Mode.PAID,
        recipe=full.name,
        form="full",
        recipe_sha256=full.sha256,
        resolved=full.record,
        parameters=parameters_of(full.tables.model, _vocabulary(full)),
        processes=chosen.offer.gpu_count or 1,
        offer=chosen.offer,
        estimate=chosen.estimate,
        lease=chosen.lease,
        cap_micros=request.max_cost_micros,
        expected_micros=chosen.expected_micros or usd(0),
        worst_micros=chosen.worst_micros or usd(0),
        candidates=quoted.candidates,
        data=_not_prepared(full, quoted.load.ship_bytes),
        bundle_sha256="",
        ship_files=0,
        ship_bytes=quoted.load.ship_bytes,
        notes=quoted.notes,
    )


def _not_prepared(full: ResolvedRecipe, size: int) -> DataSummary:
    """Data that is only spoken of."""
    data, train = full.tables.data, full.tables.train
    return DataSummary(
        folder="",
        tokenizer=data.tokenizer,
        tokenizer_sha256="",
        vocab_size=_vocabulary(full),
        train_tokens=train.steps * train.batch_tokens,
        val_tokens=0,
        bytes=size,
        sha256="",
        source=f"{data.source} (not prepared)",
    )


def _vocabulary(full: ResolvedRecipe) -> int:
    """The recipe's vocabulary; where only the text will tell, what Python source gives."""
    by_tokenizer = CHARACTERS if full.tables.data.tokenizer == "char" else GPT2_VOCABULARY
    return full.tables.model.vocab_size or by_tokenizer
