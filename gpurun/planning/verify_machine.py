"""Compare the agreed offer with the current price, the created instance, and the machine's own report.

This happens before anything is uploaded, because every minute on a wrong machine is paid for. It covers price, machine
type, number of GPUs, region, and whether the trainer can run on the machine.
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
from gpurun.planning.card_checks import check_cards, check_kind, fault_hint, other_machine_hint, visible_gpus
from gpurun.providers.base import Provider, Unknown
from gpurun.providers.catalog import card_names, rows_for
from gpurun.remote.client import LOOK_S
from gpurun.remote.machine_facts import Exported, Gpu, LinkSpeed, MachineFacts, Missing
from gpurun.view.number_format import format_bytes

STALE_S = 600.0
LEAST_GIGABYTES_PER_S = 1.0


def check_price(plan: Plan, provider: Provider, clock: Clock) -> None:
    """Raise NoOffer if the price has risen, or if it is old and cannot be read again.

    A price from the last ten minutes is accepted. If the offer no longer exists, the provider will refuse the create
    request.
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
            f"The price is more than {STALE_S / 60:.0f} min old, and it cannot be read again: {error}.",
            hint="Nothing was rented. Try again, or another --provider.",
        ) from error
    same = [
        offer.rate_micros_per_hour
        for offer in offers
        if (offer.type_id, offer.tier, offer.spot) == (agreed.type_id, agreed.tier, agreed.spot)
        and offer.region in (agreed.region, "any")
    ]
    if same and min(same) > agreed.rate_micros_per_hour:
        raise risen_price_refusal(plan, min(same), "Nothing was rented.")


def need_of_offer(offer: Offer) -> GpuNeed:
    """Return the GPU request that matches exactly the machine of an offer."""
    memory_gb = offer.vram_gb or None
    many = {"nodes": offer.nodes, "jobs": offer.jobs}
    return GpuNeed(count=offer.gpus_per_node, name=_get_card_name(offer.gpu), memory_gb=memory_gb, **many)


def check_made(instance: Instance, plan: Plan) -> None:
    """Raise NoOffer if an instance costs more than agreed, or has another type or region.

    The driver then destroys the instance.
    """
    rate = instance.rate_micros_per_hour
    if rate is not None and _costs_more(instance, plan):
        raise risen_price_refusal(plan, rate, "The instance was ended because of that.")
    if _is_other_type(instance, plan):
        kind = instance.type_id or instance.gpu or "?"
        raise NoOffer(
            "gpu.other",
            f"The instance is {instance.gpu_count or '?'}×{kind}, not {plan.offer.label} as agreed.",
            hint="Run the plan again, or choose another --provider.",
        )
    if _is_other_region(instance, plan):
        raise NoOffer(
            "region.other",
            f"The instance is in {instance.region}, not in {plan.offer.region} as agreed.",
            hint="Nothing was sent there. Try again, or another --region or --provider.",
        )


def differs_since_created(instance: Instance, born: Instance, plan: Plan) -> bool:
    """Return whether the provider's report has changed since the create reply and now differs from the agreed offer."""
    now, before = (
        (seen.rate_micros_per_hour, seen.type_id, seen.gpu, seen.gpu_count, seen.region) for seen in (instance, born)
    )
    is_wrong = _costs_more(instance, plan) or _is_other_type(instance, plan) or _is_other_region(instance, plan)
    return now != before and instance.token == born.token and is_wrong


def _costs_more(instance: Instance, plan: Plan) -> bool:
    """Return whether the instance is reported to cost more than agreed."""
    rate = instance.rate_micros_per_hour
    return rate is not None and rate > plan.offer.rate_micros_per_hour


def _is_other_type(instance: Instance, plan: Plan) -> bool:
    """Return whether a reported type, GPU or number of GPUs differs from the offer. Missing fields count as equal."""
    offer = plan.offer
    return (
        (bool(instance.type_id) and instance.type_id != offer.type_id)
        or (bool(instance.gpu) and instance.gpu != offer.gpu)
        or (bool(instance.gpu_count) and instance.gpu_count != offer.gpu_count)
    )


def _is_other_region(instance: Instance, plan: Plan) -> bool:
    """Return whether the reported region differs from the offer's. A region that is not reported counts as equal."""
    return bool(instance.region) and plan.offer.region not in ("", "any", instance.region)


def risen_price_refusal(plan: Plan, rate: Micros, outcome: str) -> NoOffer:
    """Return the refusal of a price that has risen, with the worst case at the new price."""
    lease, dearer = plan.lease, plan.offer.model_copy(update={"rate_micros_per_hour": rate})
    worst = rental_cost(dearer, lease.total_s + lease.kill_allowance_s, plan.job.home_bytes, plan.job.disk_gb)
    return NoOffer(
        "price.rose",
        f"The instance costs {format_rate(rate)}, not {format_rate(plan.offer.rate_micros_per_hour)} as agreed.",
        hint=f"{outcome} At the new price the worst case is {format_usd(worst)}; run the plan again.",
    )


def _get_card_name(gpu: str) -> str:
    """Return the --gpu name of an offer's card."""
    return card_names().get(gpu, gpu)


MOST_NAMED = 8
_UNRECORDED: dict[str, Any] = {
    "torch": {"error": True, "looks": True, "devices": {"__all__": {"uuid", "error"}}},
    "gpus": {"__all__": {"uuid", "holders"}},
    "exported": {"withheld": True, "keys": True, "note": True},
    "driver_words": True,
}
LEAST_SHM_BYTES = 1 << 30
"""The shared memory that a DataLoader's workers may need for their batches. Docker's default is 64 MB."""


def check_box(facts: MachineFacts, offer: Offer, *, accept_cpu: bool, needs_torch: bool = True) -> tuple[str, ...]:
    """Return warnings about a machine that can be used.

    Raise SetupError if the image lacks what the trainer needs, and NoOffer if the GPUs differ from the offer. With
    `accept_cpu` a machine without a CUDA device is accepted. For a command (`needs_torch` is False) only the GPUs are
    checked; without torch they are read from the driver.
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
        return (*warnings, f"torch cannot use a CUDA device there ({visible_gpus(facts)}), so training uses the CPU")
    return (*warnings, *check_cards(facts, offer))


def _command_warnings(facts: MachineFacts, offer: Offer) -> tuple[str, ...]:
    """Return warnings that concern only commands: torch that did not answer, and little shared memory."""
    warnings: tuple[str, ...] = ()
    silent = [look.python for look in facts.torch.looks if not look.answered]
    if silent and not facts.torch.found:
        warnings += (f"{_describe_no_answer(silent)}: it is not known whether it has torch",)
    if offer.gpu_count and facts.shm_bytes is not None and facts.shm_bytes < LEAST_SHM_BYTES:
        size = format_bytes(facts.shm_bytes)
        warnings += (
            f"/dev/shm has {size} there: a DataLoader with workers may end with a bus error. Use num_workers=0, or "
            "give the container more (docker run --shm-size=8g, --ipc=host)",
        )
    return warnings


def check_imports(found: Missing, plan: Plan) -> tuple[str, ...]:
    """Return warnings. Raise SetupError for a module that the uploaded folder, --pip and the machine all lack."""
    if not found.missing:
        return (found.note,) if found.note else ()
    names = ", ".join(found.missing[:MOST_NAMED])
    what = f"{plan.job.recipe} imports {names}, which {found.python} on the machine does not have"
    hint = f"Install it before the upload: --pip '{found.missing[0]}' (the name of its package), or --pip FILE."
    raise SetupError("box.no_module", f"{what}; neither your folder nor --pip has it.", hint=hint)


def on_record(facts: MachineFacts) -> dict[str, Any]:
    """Return the facts as plain data for the journal, without anything that may name a user.

    A Python's path is reduced to its name, and the output of programs is omitted; messages quote it where it matters.
    """
    record = facts.model_dump(mode="json", exclude=_UNRECORDED)
    record["torch"]["python"] = facts.torch.python and facts.torch.python.rpartition("/")[2]
    return record


def unpassed_variables(exported: Exported, globs: Sequence[str]) -> list[str]:
    """Return the variables that the machine's login exports and the job does not get, except keys."""
    return [name for name in exported.withheld if not any(fnmatchcase(name, glob) for glob in globs)]


def login_warnings(exported: Exported, globs: Sequence[str]) -> list[str]:
    """Return warnings about keys in the machine's login. The job gets a key only if --pass-env names it."""
    keys = [name for name in exported.keys if name not in globs]
    shown = ", ".join(keys[:MOST_NAMED])
    what = f"{shown} in the machine's login looks like a key and is not passed to the job; to pass it: --pass-env"
    notes = [f"the machine's login: {exported.note}"] if exported.note else []
    return [f"{what} {keys[0]}", *notes] if keys else notes


def _describe_no_answer(pythons: Sequence[str]) -> str:
    """Return a clause that states that these Pythons did not answer in time."""
    return f"{', '.join(pythons)} did not answer within {LOOK_S} s while importing torch"


def check_nodes(seen: LinkSpeed, head: MachineFacts, offer: Offer, choices: Choices) -> None:
    """Raise NoOffer if a node of a job lacks ordered GPUs, or if the network between the nodes is too slow.

    `check_box` checks the first node in detail.
    """
    if len(seen.nodes) != offer.nodes:
        raise NoOffer(
            "nodes.fewer",
            f"{offer.label} was ordered; nodes that answered: {len(seen.nodes)}.",
            hint=other_machine_hint(offer),
        )
    if not offer.gpu_count or (not any(node.devices for node in seen.nodes) and choices.accept_cpu):
        return
    for node in seen.nodes:
        if len(node.devices) < offer.gpus_per_node:
            what = f"{offer.label} was ordered; torch on node {node.name} can use {len(node.devices)} GPUs."
            raise NoOffer("nodes.fewer_gpus", what, hint=other_machine_hint(offer))
        devices = head.torch.model_copy(update={"devices": node.devices})
        check_kind(head.model_copy(update={"torch": devices}), offer)
    rate = seen.gigabytes_per_s or 0.0
    if rate < LEAST_GIGABYTES_PER_S and not choices.slow_network:
        what = f"An all-reduce over the {offer.nodes} nodes ran at {rate:.2g} GB/s, and at less than "
        what += f"{LEAST_GIGABYTES_PER_S:g} GB/s the cards wait for one another."
        hint = "Let torch use the fast network (NCCL_SOCKET_IFNAME in `setup`), or accept it: --slow-network."
        raise NoOffer("nodes.slow", what, hint=hint)


def _check_python(facts: MachineFacts, offer: Offer, hint: str) -> tuple[str, ...]:
    """Check that a Python on the machine has numpy and a torch that is new enough. Return warnings, or raise."""
    torch = facts.torch
    silent = [look.python for look in torch.looks if not look.answered]
    words = "".join(f" {look.python}: {look.words}." for look in torch.looks if look.answered and look.words)
    if not torch.found and silent:
        slow = "Its disk is slow, or a card hangs: import torch there by hand, name another Python (--python PATH)"
        what = f"{_describe_no_answer(silent)}; no other Python on the instance has torch.{words}"
        raise NoOffer("box.torch_silent", what, hint=fault_hint(offer, slow))
    if not torch.found:
        raise SetupError("box.no_torch", f"No Python on the instance imports torch.{words}", hint=hint)
    if torch.numpy is None:
        raise SetupError("box.no_numpy", f"{torch.python} on the instance has no numpy.", hint=hint)
    version = re.match(r"(\d+)\.(\d+)", torch.version or "")
    if version is None:
        return (f"torch there calls itself {torch.version!r}: it is not known whether that is {LEAST_TORCH} or newer",)
    if (int(version[1]), int(version[2])) < tuple(map(int, LEAST_TORCH.split("."))):
        what = f"The instance has torch {torch.version}; the trainer needs {LEAST_TORCH} or newer."
        raise SetupError("box.old_torch", what, hint=hint)
    return ()
