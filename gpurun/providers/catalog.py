"""Reads the packaged, dated catalogue of offers (catalog.toml), and parses the names of GPUs.

The catalogue is for plans and rehearsals. A cap never depends on it, because the live price is read before a create.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpurun.core.errors import NoOffer, UsageError, did_you_mean
from gpurun.core.installed_files import cards as peaks
from gpurun.core.money import Micros, usd
from gpurun.core.records import GpuNeed, Offer
from gpurun.core.run_plan import Request

_NODES = re.compile(r"(\d{1,4})\s*[x×*]\s*(cpu|\d{1,4}\s*[x×*].*)", re.IGNORECASE)
_GPU = re.compile(r"(?:(\d{1,4})\s*[x×*]\s*)?([a-z][a-z0-9 ]*?|\d{4}(?: ?ada)?)(?:-(\d{1,4})\s*gb?)?", re.IGNORECASE)
_BY_NAME_ONLY = {"GH200": "aarch64"}
"""Cards in machines that are not x86_64. They are offered only if requested by name."""
_TIERS = ("secure", "community")
"""RunPod's two clouds. They are given in place of a region, on which RunPod's prices do not depend."""


@dataclass(frozen=True)
class GpuModel:
    """A kind of GPU.

    `tflops` is the dense 16-bit peak: of bf16 or, without bf16, of fp16. `mfu` is the range of its utilisation to plan
    with. `nvlink`: the cards of one machine are linked faster than by PCIe. `expected_mfu` is the utilisation of
    gpurun's own training loop, and `rests_on` is the source of that figure.
    """

    name: str
    tflops: float
    fp32_tflops: float
    mfu: tuple[float, float]
    bf16: bool
    nvlink: bool
    expected_mfu: float | None
    rests_on: str


@dataclass(frozen=True)
class Terms:
    """What a provider bills besides the hourly rate, and how long its machines may take to boot.

    `with_guard` replaces `dies_by_itself` if the user puts a key on the machine with which it ends itself. `boot_s` is
    the boot time that a lease includes. `patience` is how long gpurun waits for a machine that is still booting. Both
    are in seconds; each key is the smallest number of GPUs to which its value applies.
    """

    billing_unit_s: int
    dies_by_itself: str
    boot_s: dict[int, int]
    patience: dict[int, int]
    least_disk_gb: int
    disk_per_gb_hour: Micros
    other_per_hour: Micros
    egress_per_gb: Micros
    with_guard: str = ""
    least_billed_s: int = 0

    def boot_limit_s(self, gpu_count: int) -> int:
        """Return the planned seconds from create to login for a machine with this number of GPUs."""
        return _choose_limit_by_count(self.boot_s, gpu_count)

    def patience_s(self, gpu_count: int) -> int:
        """Return how many seconds gpurun waits for such a machine to boot; 0 if the catalogue has no figure."""
        return _choose_limit_by_count(self.patience, gpu_count)


def _choose_limit_by_count(limits_s: dict[int, int], gpu_count: int) -> int:
    return max((limit for least, limit in limits_s.items() if least <= max(1, gpu_count)), default=0)


FREE = Terms(1, "", {}, {}, 0, usd(0), usd(0), usd(0))


@cache
def _read_catalog() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).with_name("catalog.toml")).read_text(encoding="utf-8"))


@cache
def cards() -> dict[str, GpuModel]:
    """Return every kind of GPU with a known speed, by its name in an offer."""
    expected = _read_catalog()["expected"]
    return {
        kind: GpuModel(
            name=facts["name"],
            tflops=peaks.PEAKS[kind][1],
            fp32_tflops=facts.get("fp32_tflops", peaks.PEAKS[kind][1] / 2),  # TF32, which the trainer allows.
            mfu=(facts["mfu"][0], facts["mfu"][1]),
            bf16=facts.get("bf16", True),
            nvlink=facts.get("nvlink", "SXM" in kind),
            expected_mfu=expected.get(kind, {}).get("mfu"),
            rests_on=expected.get(kind, {}).get("by", ""),
        )
        for kind, facts in _read_catalog()["gpus"].items()
    }


def card_of(gpu: str) -> GpuModel | None:
    """Return the card with this name in an offer; None if its speed is not known."""
    return cards().get(gpu)


@cache
def card_names() -> dict[str, str]:
    """Return the name in --gpu of each kind of card, including cards of unknown speed."""
    return {kind: facts["name"] for kind, facts in (_read_catalog()["gpus"] | _read_catalog()["unmeasured"]).items()}


@cache
def terms_of(provider: str, region: str = "") -> Terms:
    """Return a provider's terms. A provider without an entry in the catalogue (`local`, `ssh`) bills only its rate.

    Without a region, the prices of disk and egress are those of the usual regions. Other regions may cost more.
    """
    facts = _read_catalog()["providers"].get(provider)
    if facts is None:
        return FREE
    elsewhere = facts.get("elsewhere")
    if region and elsewhere and not region.startswith(tuple(elsewhere["but_in"])):
        facts = facts | elsewhere
    return Terms(
        billing_unit_s=facts["billing_unit_s"],
        dies_by_itself=facts["dies_by_itself"],
        boot_s={int(least): limit for least, limit in facts["boot_s"].items()},
        patience={int(least): limit for least, limit in facts["patience_s"].items()},
        least_disk_gb=facts["least_disk_gb"],
        disk_per_gb_hour=usd(facts["disk_usd_per_gb_hour"]),
        other_per_hour=usd(facts["other_usd_per_hour"]),
        egress_per_gb=usd(facts["egress_usd_per_gb"]),
        with_guard=facts.get("with_guard", ""),
        least_billed_s=facts.get("least_billed_s", 0),
    )


@cache
def all_offers() -> tuple[Offer, ...]:
    """Return every offer of the catalogue, in the order of the file."""
    date = _read_catalog()["date"]
    offers = []
    for provider, type_id, gpu, count, gb, dollars, place, source in _read_catalog()["offers"]["rows"]:
        terms = terms_of(provider)
        is_tier = place in _TIERS
        offers.append(
            Offer(
                provider=provider,
                type_id=type_id,
                gpu=gpu,
                gpu_count=count,
                vram_gb=gb if count else 0,
                memory_gb=0 if count else gb,
                region="any" if is_tier else place,
                rate_micros_per_hour=usd(dollars),
                billing_unit_s=terms.billing_unit_s,
                boot_s=terms.boot_limit_s(count),
                price_source=f"catalogue {date} ({source})",
                dies_by_itself=terms.dies_by_itself,
                arch=_BY_NAME_ONLY.get(gpu, "x86_64"),
                tier=place if is_tier else "",
            )
        )
    return tuple(offers)


def offers_for(need: GpuNeed) -> list[Offer]:
    """Return the catalogue's offers for a need, cheapest first; an empty list if there are none.

    A GPU's name covers all its forms (PCIe, SXM). If the need has no memory size, it covers all sizes, too.
    """
    found = [offer for offer in all_offers() if offer.gpu_count == need.count and _has_card(offer, need)]
    return sorted(found, key=lambda offer: (offer.rate_micros_per_hour, offer.provider, offer.type_id, offer.region))


def rows_for(need: GpuNeed, provider: str = "") -> list[Offer]:
    """Return the rows for the needed card with any number of cards, of one provider or of all. They need live prices.

    Cards of unknown speed are included. The catalogue has no price for them.
    """
    rows = [*all_offers(), *_rows_without_speed()]
    return [offer for offer in rows if provider in ("", offer.provider) and _has_card(offer, need)]


def _has_card(offer: Offer, need: GpuNeed) -> bool:
    """Return whether an offer has the needed card, in any number. `any` covers only x86_64 machines."""
    if not need.count or not offer.gpu_count:
        return need.count == offer.gpu_count
    if need.is_any:
        return offer.gpu not in _BY_NAME_ONLY
    return card_names()[offer.gpu] == need.name and need.memory_gb in (None, offer.vram_gb)


@cache
def _rows_without_speed() -> tuple[Offer, ...]:
    """Return the rows of cards of unknown speed. They have no price, so only a live price makes them offers."""
    terms = terms_of("runpod")
    return tuple(
        Offer(
            provider="runpod",
            type_id=facts["runpod"],
            gpu=kind,
            gpu_count=1,
            vram_gb=facts["gb"],
            region="any",
            rate_micros_per_hour=usd(0),
            billing_unit_s=terms.billing_unit_s,
            boot_s=terms.boot_limit_s(1),
            price_source="",
            dies_by_itself=terms.dies_by_itself,
        )
        for kind, facts in _read_catalog()["unmeasured"].items()
    )


def counts_of(need: GpuNeed, providers: Sequence[str] = ()) -> list[int]:
    """Return the numbers of this GPU in one machine that the catalogue, or these providers, offer."""
    found = (offer for offer in all_offers() if offer.gpu_count and _has_card(offer, need))
    return sorted({offer.gpu_count for offer in found if not providers or offer.provider in providers})


def gpu_flag(offer: Offer) -> str:
    """Return the value of --gpu that requests an offer's machine, such as `8xA100` or `cpu`."""
    name = card_names().get(offer.gpu, offer.gpu) if offer.gpu_count else "cpu"
    return str(GpuNeed(count=offer.gpus_per_node, name=name, nodes=offer.nodes * offer.jobs))


def kind_of(cuda_name: str) -> str | None:
    """Return the catalogue's kind of a card by its name in CUDA; None if the name is not known."""
    kinds = [kind for kind in cards() if re.search(peaks.PEAKS[kind][0], cuda_name)]
    return next((kind for kind in kinds if kind.split()[-1] in cuda_name), kinds[0] if kinds else None)


def parse_gpu(text: str, *, name: str = "--gpu") -> GpuNeed:
    """Parse `8xA100`, `A100` (one card), `8xA100-80GB`, `any` or `cpu`, and `2x8xA100` or `2xcpu` for two nodes.

    Raises a UsageError for anything else. For an unknown GPU, it suggests the most similar name.
    """
    if together := _NODES.fullmatch(text.strip()):
        single = parse_gpu(together[2], name=name)
        if single.nodes > 1:
            raise UsageError("gpu.malformed", f"{name} {text!r} is not of the form 2x8xA100.", hint=f"Write {single}.")
        if int(together[1]) < 1:
            raise UsageError("gpu.none", f"{name} {text!r} asks for 0 nodes.", hint=f"Write {single} for one node.")
        return single.model_copy(update={"nodes": int(together[1])})
    if text.strip().lower() == "cpu":
        return GpuNeed(count=0, name="cpu")
    match = _GPU.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            "gpu.malformed",
            f"{name} {text!r} is not of the form 8xA100.",
            hint="Write 8xA100, 1xH100, A100-80GB, any or cpu; 2x8xA100 is two nodes with 8 each.",
        )
    count = int(match[1] or 1)
    typed = match[2]
    memory = match[3]
    gpu = _correct_name(typed, f"{name} {text!r}", count)
    if count < 1:
        raise UsageError("gpu.none", f"{name} {text!r} asks for 0 GPUs.", hint=f"Write 1x{gpu}, or cpu.")
    if memory is not None:
        sizes = sorted({offer.vram_gb for offer in rows_for(GpuNeed(count=count, name=gpu))})
        if int(memory) not in sizes:
            have = " or ".join(f"{size} GB" for size in sizes)
            raise UsageError(
                "gpu.unknown_memory",
                f"{name} {text!r}: there is no {gpu} with {memory} GB.",
                hint=f"{gpu} comes with {have}.",
            )
    return GpuNeed(count=count, name=gpu, memory_gb=int(memory) if memory else None)


def demand_one_node(need: GpuNeed | None) -> None:
    """Raise a UsageError if the need has several nodes. gpurun joins nodes only on a Slurm cluster."""
    if need is None or need.nodes == 1:
        return
    what = f"{need} is {need.nodes} nodes, and only `gpurun train` and `gpurun run` on a cluster with Slurm join nodes."
    single = need.model_copy(update={"nodes": 1})
    raise UsageError("gpu.nodes", what, hint=f"Request one node: --gpu {single}. For a cluster, add --provider slurm.")


def _correct_name(typed: str, where: str, count: int) -> str:
    """Return the catalogue's spelling of a GPU's name; UsageError, with a suggestion, if it is unknown."""
    known = {name.lower(): name for name in (*card_names().values(), "any")}
    plain = typed.lower().replace(" ", "")
    for candidate in (plain, f"rtx{plain}", plain.removeprefix("rtx")):
        if candidate in known:
            return known[candidate]
    others = f"It has {', '.join(sorted(known.values()))}."
    hint = did_you_mean(typed.upper(), known.values(), otherwise=others, cutoff=0.3)
    turned = re.fullmatch(r"(?i)(.+)x(\d+)", typed)  # A100x8
    meant, number = (turned[1], turned[2]) if turned else (typed, count)
    digits = meant.lower().replace("o", "0")
    for candidate in (meant.lower(), digits, digits.replace("l", "1")):
        if candidate in known:
            hint = f"Did you mean {number}x{known[candidate]}?"
    raise UsageError("gpu.unknown", f"{where}: there is no GPU {typed!r} in the catalogue.", hint=hint)


def catalogue_words() -> str:
    """Return the name of the catalogue, such as `packaged catalogue 2026-11-20`."""
    return f"packaged {all_offers()[0].price_source.split(' (')[0]}"


def catalogue_offers(request: Request, need: GpuNeed) -> list[Offer]:
    """Return the catalogue's offers for a need in the requested clouds and region; NoOffer if there are none."""
    clouds = _list_clouds(request)
    offers = [offer for offer in offers_for(need) if not clouds or offer.provider in clouds]
    if not offers:
        sold = ", ".join(f"{count}x{need.name}" for count in counts_of(need, clouds))
        what = f"{' and '.join(clouds)} has no {need}" if clouds else f"No provider in the catalogue has {need}"
        hint = f"Sold as {sold}." if sold else "Try another --gpu or provider."
        if need.name in {card_names()[row.gpu] for row in _rows_without_speed()}:
            what = f"The catalogue has no price for {need}"
            hint = "RunPod reports one if you add its key (gpurun auth set runpod). The speed is unknown: add --hours."
        raise NoOffer("offer.none", f"{what}.", hint=hint)
    here = _select_requested_offers(offers, request)
    if not here:
        regions = ", ".join(sorted({offer.region for offer in offers}))
        hint = f"The catalogue has: {regions}."
        raise NoOffer("offer.no_region", f"{need} is not offered in {request.choices.region!r}.", hint=hint)
    return here


def list_alternatives(
    request: Request, need: GpuNeed, *, on_cpu: bool, queried: Collection[str] | None = None
) -> list[Offer]:
    """Return the catalogue's alternatives: offers of other GPUs, and those for the need from clouds not in `queried`.

    `queried` are the clouds that were queried for live offers; None for all. Machines without a GPU are included only
    with `on_cpu`.
    """
    own = {offer for offer in offers_for(need) if queried is None or offer.provider in queried}
    rest = [offer for offer in all_offers() if offer not in own and (offer.gpu_count or on_cpu)]
    return _select_requested_offers(rest, request)


def _list_clouds(request: Request) -> list[str]:
    return [name for name in request.providers if name != "local"]


def _select_requested_offers(offers: list[Offer], request: Request) -> list[Offer]:
    """Return the offers in the requested clouds and region, with a guard key where the user chose one."""
    clouds, region = _list_clouds(request), request.choices.region
    here = [offer for offer in offers if not clouds or offer.provider in clouds]
    here = [offer for offer in here if region is None or offer.region in (region, "any")]
    # Some machine types differ only in their name; only the first of them is offered.
    found: dict[tuple[object, ...], Offer] = {}
    for offer in here:
        found.setdefault((offer.provider, offer.label, offer.place, offer.rate_micros_per_hour), offer)
    return [_add_guard(offer, request) for offer in found.values()]


def _add_guard(offer: Offer, request: Request) -> Offer:
    """Return the offer with a guard key on the machine, if the user chose that and the cloud supports it."""
    words = terms_of(offer.provider).with_guard if request.choices.guard else ""
    return offer.model_copy(update={"dies_by_itself": words}) if words else offer
