"""What was agreed to, held against what is on sale, what was made, and what the machine says of itself.

Price, machine type, number of GPUs, region, and whether the trainer can run there: it is judged before anything is
uploaded, as every minute on a wrong machine is paid for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from gpurun.core.clock import Clock
from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.money import Micros, format_rate, format_usd
from gpurun.core.places import place_facts
from gpurun.core.records import GpuNeed, Instance, Offer
from gpurun.core.run_plan import Choices, Plan
from gpurun.jobs.requirements import LEAST_TORCH
from gpurun.planning.budget import rental_cost
from gpurun.planning.card_checks import another, check_cards, check_kind, elsewhere, seen
from gpurun.providers.base import Provider, Unknown
from gpurun.providers.catalog import card_names, rows_for
from gpurun.remote.client import LOOK_S
from gpurun.remote.machine_facts import Exported, Gpu, LinkSpeed, MachineFacts, Missing
from gpurun.view.number_format import format_bytes

STALE_S = 600.0
LEAST_GIGABYTES_PER_S = 1.0


def check_price(plan: Plan, provider: Provider, clock: Clock) -> None:
    """Before anything is asked for: refuse a price that has risen, or one that is old and cannot be read again.

    A price read in the last ten minutes stands. An offer that is not on sale any more is for the provider to refuse.
    """
    if not plan.quoted_wall or 0 <= clock.wall() - plan.quoted_wall <= STALE_S:
        return
    agreed = plan.offer
    need = need_of_offer(agreed)
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


def need_of_offer(offer: Offer) -> GpuNeed:
    """Return the need that asks a provider for the very machine of an offer."""
    memory_gb = offer.vram_gb or None
    many = {"nodes": offer.nodes, "jobs": offer.jobs}
    return GpuNeed(count=offer.gpus_per_node, name=_card(offer.gpu), memory_gb=memory_gb, **many)


def check_made(instance: Instance, plan: Plan) -> None:
    """Refuse an instance that costs more than was agreed to, is another or elsewhere; the driver destroys it."""
    rate = instance.rate_micros_per_hour
    if rate is not None and _costs_more(instance, plan):
        raise rose(plan, rate, "It was ended for that.")
    if _is_another(instance, plan):
        kind = instance.type_id or instance.gpu or "?"
        raise NoOffer(
            "gpu.other",
            f"It is {instance.gpu_count or '?'}×{kind}, not the {plan.offer.label} agreed to.",
            hint="Run the plan again, or choose another --provider.",
        )
    if _is_elsewhere(instance, plan):
        raise NoOffer(
            "region.other",
            f"It stands in {instance.region}, not in {plan.offer.region} as was agreed to.",
            hint="Nothing was sent there. Try again, or another --region or --provider.",
        )


def is_told_otherwise(instance: Instance, born: Instance, plan: Plan) -> bool:
    """Whether the provider says only now that what it made is not what was agreed to."""
    now, before = (
        (one.rate_micros_per_hour, one.type_id, one.gpu, one.gpu_count, one.region) for one in (instance, born)
    )
    is_wrong = _costs_more(instance, plan) or _is_another(instance, plan) or _is_elsewhere(instance, plan)
    return now != before and instance.token == born.token and is_wrong


def _costs_more(instance: Instance, plan: Plan) -> bool:
    """Whether it is told to cost more than was agreed to."""
    rate = instance.rate_micros_per_hour
    return rate is not None and rate > plan.offer.rate_micros_per_hour


def _is_another(instance: Instance, plan: Plan) -> bool:
    """Whether it is not the machine of the offer; what a provider does not tell is not held against it."""
    offer = plan.offer
    return (
        (bool(instance.type_id) and instance.type_id != offer.type_id)
        or (bool(instance.gpu) and instance.gpu != offer.gpu)
        or (bool(instance.gpu_count) and instance.gpu_count != offer.gpu_count)
    )


def _is_elsewhere(instance: Instance, plan: Plan) -> bool:
    """Whether it stands in another region than the one that was named; where it stands may be told late, or never."""
    return bool(instance.region) and plan.offer.region not in ("", "any", instance.region)


def rose(plan: Plan, rate: Micros, outcome: str) -> NoOffer:
    """The refusal of a price, with the worst case that it would mean."""
    lease, dearer = plan.lease, plan.offer.model_copy(update={"rate_micros_per_hour": rate})
    worst = rental_cost(dearer, lease.total_s + lease.kill_allowance_s, plan.job.home_bytes, plan.job.disk_gb)
    return NoOffer(
        "price.rose",
        f"The instance costs {format_rate(rate)}, not the {format_rate(plan.offer.rate_micros_per_hour)} agreed to.",
        hint=f"{outcome} At the new price the worst case is {format_usd(worst)}; run the plan again.",
    )


def _card(gpu: str) -> str:
    """The name that --gpu takes for the card of an offer."""
    return card_names().get(gpu, gpu)


MOST_NAMED = 8
_NOT_ON_RECORD: dict[str, Any] = {
    "torch": {"error": True, "looks": True, "devices": {"__all__": {"uuid", "error"}}},
    "gpus": {"__all__": {"uuid", "holders"}},
    "exported": {"withheld": True, "keys": True, "note": True},
    "driver_words": True,
}
LEAST_SHM_BYTES = 1 << 30
"""What the workers of a DataLoader may need to hand over batches; Docker's own is 64 MB."""


def check_box(facts: MachineFacts, offer: Offer, *, accept_cpu: bool, needs_torch: bool = True) -> tuple[str, ...]:
    """Warnings about a machine that will do.

    Raises SetupError where the image lacks what the trainer needs, NoOffer where the GPUs are not those of the offer.
    With `accept_cpu` a machine without a CUDA device will do. What a command needs beside its cards is its own affair:
    where nothing there has torch, the driver is asked for them.
    """
    warnings = () if needs_torch else _command_warnings(facts, offer)
    if not needs_torch and not facts.torch.found:
        cards = tuple(Gpu(name=card.name, memory_bytes=card.memory_bytes or 0, uuid=card.uuid) for card in facts.gpus)
        facts = facts.model_copy(update={"torch": facts.torch.model_copy(update={"devices": cards})})
    better = f"Choose an image with torch {LEAST_TORCH} or newer and numpy: --image."
    if place_facts(offer.provider).is_own_box:
        better = (
            f"Install torch {LEAST_TORCH} or newer and numpy there, or name the Python that has them: --python PATH."
        )
    warnings += _check_python(facts, offer, better) if needs_torch else ()
    if not offer.gpu_count:
        return warnings
    if not facts.torch.devices and accept_cpu:
        return (*warnings, f"torch can use no CUDA device there ({seen(facts)}): it trains on the CPU")
    return (*warnings, *check_cards(facts, offer))


def _command_warnings(facts: MachineFacts, offer: Offer) -> tuple[str, ...]:
    """Return what a command should know of a machine that the bundled trainer does not need."""
    warnings: tuple[str, ...] = ()
    silent = [look.python for look in facts.torch.looks if not look.answered]
    if silent and not facts.torch.found:
        warnings += (f"{_silence(silent)}: whether it has torch is not known",)
    if offer.gpu_count and facts.shm_bytes is not None and facts.shm_bytes < LEAST_SHM_BYTES:
        size = format_bytes(facts.shm_bytes)
        warnings += (
            f"/dev/shm has {size} there: a DataLoader with workers may end with a bus error. Use num_workers=0, or "
            "give the container more (docker run --shm-size=8g, --ipc=host)",
        )
    return warnings


def check_imports(found: Missing, plan: Plan) -> tuple[str, ...]:
    """SetupError where a module is neither in the uploaded folder nor in --pip nor on the machine; else warnings."""
    if not found.missing:
        return (found.note,) if found.note else ()
    names = ", ".join(found.missing[:MOST_NAMED])
    what = f"{plan.job.recipe} imports {names}, which {found.python} on the machine does not have"
    hint = f"Have it installed before the upload: --pip '{found.missing[0]}' (by its package's name), or --pip FILE."
    raise SetupError("box.no_module", f"{what}; neither your folder nor --pip has it.", hint=hint)


def on_record(facts: MachineFacts) -> dict[str, Any]:
    """Return the facts as plain data, for the journal; of the Python there its name, since a path can tell whose it is.

    So can the words of programs: what they mean is judged here, and told where it matters.
    """
    record = facts.model_dump(mode="json", exclude=_NOT_ON_RECORD)
    record["torch"]["python"] = facts.torch.python and facts.torch.python.rpartition("/")[2]
    return record


def not_passed(exported: Exported, globs: Sequence[str]) -> list[str]:
    """Return the names of what the machine's login exports and the job does not get; of keys see `login_warnings`."""
    return [name for name in exported.withheld if not any(fnmatchcase(name, glob) for glob in globs)]


def login_warnings(exported: Exported, globs: Sequence[str]) -> list[str]:
    """Return what of the machine's login the job would use and does not get: a key needs its whole name."""
    keys = [name for name in exported.keys if name not in globs]
    shown = ", ".join(keys[:MOST_NAMED])
    what = f"{shown} of the machine's login looks like a key and is not passed on; by its name it is: --pass-env"
    notes = [f"the machine's login: {exported.note}"] if exported.note else []
    return [f"{what} {keys[0]}", *notes] if keys else notes


def _silence(pythons: Sequence[str]) -> str:
    """That Pythons did not answer in time."""
    return f"{', '.join(pythons)} did not answer within {LOOK_S} s while it imported torch"


def check_nodes(seen: LinkSpeed, head: MachineFacts, offer: Offer, choices: Choices) -> None:
    """Whether every node of a job has the cards that were ordered; NoOffer where one lacks some, or all are too slow.

    The first node's own answers are judged by `check_box`.
    """
    if len(seen.nodes) != offer.nodes:
        raise NoOffer(
            "nodes.fewer", f"{offer.label} was ordered; nodes that answered: {len(seen.nodes)}.", hint=another(offer)
        )
    if not offer.gpu_count or (not any(node.devices for node in seen.nodes) and choices.accept_cpu):
        return
    for node in seen.nodes:
        if len(node.devices) < offer.gpus_per_node:
            what = f"{offer.label} was ordered; torch on node {node.name} can use {len(node.devices)} GPUs."
            raise NoOffer("nodes.fewer_gpus", what, hint=another(offer))
        devices = head.torch.model_copy(update={"devices": node.devices})
        check_kind(head.model_copy(update={"torch": devices}), offer)
    rate = seen.gigabytes_per_s or 0.0
    if rate < LEAST_GIGABYTES_PER_S and not choices.slow_network:
        what = f"An all-reduce over the {offer.nodes} nodes ran at {rate:.2g} GB/s, and less than "
        what += f"{LEAST_GIGABYTES_PER_S:g} GB/s leaves the cards waiting for one another."
        hint = "See that torch finds the fast network (NCCL_SOCKET_IFNAME in `setup`), or train anyhow: --slow-network."
        raise NoOffer("nodes.slow", what, hint=hint)


def _check_python(facts: MachineFacts, offer: Offer, hint: str) -> tuple[str, ...]:
    """Whether some Python there has a torch that is new enough, and numpy."""
    torch = facts.torch
    silent = [look.python for look in torch.looks if not look.answered]
    words = "".join(f" {look.python}: {look.words}." for look in torch.looks if look.answered and look.words)
    if not torch.found and silent:
        slow = "Its disk is slow, or a card hangs: import torch there by hand, name another Python (--python PATH)"
        what = f"{_silence(silent)}; no other Python of the instance has torch.{words}"
        raise NoOffer("box.torch_silent", what, hint=elsewhere(offer, slow))
    if not torch.found:
        raise SetupError("box.no_torch", f"No Python on the instance imports torch.{words}", hint=hint)
    if torch.numpy is None:
        raise SetupError("box.no_numpy", f"{torch.python} on the instance has no numpy.", hint=hint)
    version = re.match(r"(\d+)\.(\d+)", torch.version or "")
    if version is None:
        return (f"torch there calls itself {torch.version!r}: whether that is {LEAST_TORCH} or newer is unknown",)
    if (int(version[1]), int(version[2])) < tuple(map(int, LEAST_TORCH.split("."))):
        what = f"The instance has torch {torch.version}; the trainer needs {LEAST_TORCH} or newer."
        raise SetupError("box.old_torch", what, hint=hint)
    return ()
