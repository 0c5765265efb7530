"""The plan of a run on a machine that is not rented here: this one, or a box that the user has, over SSH."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf

from gpurun.core.clock import Clock
from gpurun.core.cluster import Cluster, cluster_of
from gpurun.core.errors import NoOffer, SetupError, UsageError
from gpurun.core.money import SECONDS_PER_HOUR, seconds_within, usd
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Offer
from gpurun.core.run_plan import Candidate, DataSummary, Lease, Mode, Plan, Request
from gpurun.core.settings import load_clusters
from gpurun.jobs.requirements import setup_limit_s
from gpurun.jobs.training.history import load_priors, uplink_of
from gpurun.jobs.training.memory import GIB, tensor_bytes, way_of
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.planning.budget import candidates, choose, reach_words, rental_cost
from gpurun.planning.candidates import build_plan, need_of
from gpurun.planning.cloud_plan import shards_of
from gpurun.planning.own_box import login_to, reached
from gpurun.planning.transfer import load_for
from gpurun.providers.base import NoCapacity, Unknown
from gpurun.providers.catalog import offers_for, rows_for
from gpurun.providers.local import LocalProvider
from gpurun.providers.slurm.jobs import Partition
from gpurun.providers.slurm.provider import Site, SlurmProvider
from gpurun.providers.ssh import SshBox, SshProvider
from gpurun.providers.ssh_login import Login, parse_host
from gpurun.view.number_format import format_duration

_SURE = ("", "proctrack/cgroup")
QUEUE_S = 24 * SECONDS_PER_HOUR
"""So long a job may wait to begin where nobody says it with --queue."""


def local_plan(
    request: Request,
    run: str,
    mode: Mode,
    resolved: ResolvedRecipe,
    home: Home,
    clock: Clock,
    say: Callable[[str], None],
) -> Plan:
    """The plan of a run on this machine; its shards are prepared."""
    data = shards_of(request, run, resolved, home, say)
    offer = LocalProvider(home, clock).offers(GpuNeed(count=0, name="cpu"), ())[0]
    return _plan_on(offer, request, run, mode, resolved, data, home)


def small_memory(plan: Plan, resolved: ResolvedRecipe) -> UsageError | None:
    """What is wrong with a run on this machine's CPU whose tensors its memory cannot hold: the kernel would kill it.

    A refusal is certain: what the interpreter, torch and a checkpoint that is being saved take is not counted.
    """
    micro_batch, vocab_size = plan.estimate.micro_batch, plan.data.vocab_size
    way = way_of(resolved, plan.offer, plan.processes, micro_batch, vocab_size)
    needed = plan.processes * tensor_bytes(resolved.tables.model, micro_batch, vocab_size, way)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= there:
        return None
    return UsageError(
        "memory.small",
        f"Training {plan.job.parameters:,} parameters takes at least {needed / GIB:.1f} GiB of memory here, and this "
        f"machine has {there / GIB:.1f} GiB.",
        hint="Cut one of these with --set (model.layers, model.width, model.context, train.micro_batch), or train it "
        "on a GPU.",
    )


def box_plan(
    request: Request, run: str, resolved: ResolvedRecipe, home: Home, clock: Clock, say: Callable[[str], None]
) -> Plan:
    """The plan of a run on a box that the user has: its host key is settled, and it has answered.

    Its price is the user's word. What it does not do now it would not do in a run either: that is a SetupError.
    """
    offer, login = box_offer(request, need_of(request, resolved), home, clock)
    settled, told = reached(request, login, home, clock)
    data = shards_of(request, run, resolved, home, say)
    plan = _plan_on(offer, request, run, Mode.PAID, resolved, data, home)
    return plan.told(*told, warnings=box_warnings(offer)).model_copy(update={"box": settled})


def job_plan(
    request: Request, run: str, resolved: ResolvedRecipe, home: Home, clock: Clock, say: Callable[[str], None]
) -> Plan:
    """The plan of a run as a job of a cluster.

    What caps it beside the partition's own limit is --max-cost where the cluster has a price, and GPU-hours.
    """
    offer, part = job_offer(request, need_of(request, resolved), home, clock)
    choices = request.choices.model_copy(update={"region": offer.region})
    request = request.model_copy(update={"choices": choices})
    data = shards_of(request, run, resolved, home, say)
    plan = _plan_on(offer, request, run, Mode.PAID, resolved, data, home)
    chosen, notes, warnings = in_queue(plan.chosen, part, request, plan.job.home_bytes, plan.job.disk_gb)
    return plan.told(*notes, warnings=warnings).model_copy(update={"chosen": chosen})


def job_offer(request: Request, need: GpuNeed, home: Home, clock: Clock) -> tuple[Offer, Partition]:
    """A job of the cluster that was named, which has answered: what it has is what it said a moment ago."""
    cluster = cluster_of(load_clusters(home), request.choices.region)
    if cluster.price_per_gpu_hour:
        _demand_cap(request)
    provider = SlurmProvider([Site(cluster, login_to(cluster, home, clock))], clock)
    try:
        part = provider.partition()
        known = offers_for(need) or sorted(rows_for(need), key=lambda row: row.rate_micros_per_hour)
        offers = provider.offers(need, known)
    except Unknown as error:
        hint = "Try again once its controller answers: sinfo, on the login node."
        raise SetupError("slurm.no_answer", f"{cluster.name} does not answer: {error}.", hint=hint) from error
    except NoCapacity as error:
        raise NoOffer("slurm.no_partition", f"{error}.", hint="Name one in config.toml: sinfo shows them.") from error
    if not offers:
        raise _too_few(part, cluster, need)
    return offers[0], part


def _too_few(part: Partition, cluster: Cluster, need: GpuNeed) -> NoOffer:
    """What a partition lacks for a need, in numbers."""
    where = f"partition {part.name} of {cluster.name}"
    what = f"No node of {where} has {need.count} GPUs; the most is {part.most_gpus}."
    if there := part.nodes_with(need.count):
        each = f" with {need.count} GPUs each" if need.count else ""
        what = f"{need} is {need.nodes} nodes{each}; {where} has {there} that work{'s' if there == 1 else ''}."
    elif not need.count:
        what = f"No node of {where} works."
    return NoOffer("slurm.too_few", what, hint="Ask for fewer with --gpu, or name another partition in config.toml.")


def in_queue(
    chosen: Candidate, part: Partition, request: Request, collect_bytes: int, disk_gb: int
) -> tuple[Candidate, list[str], list[str]]:
    """A job with the lease that its caps and its partition allow, and the notes and warnings of the plan for that."""
    assert chosen.lease is not None
    lease, notes = _job_lease(chosen.lease, chosen.offer, part, request)
    worst = rental_cost(chosen.offer, lease.total_s + lease.kill_allowance_s, collect_bytes, disk_gb)
    where = f"{chosen.offer.region} finds a job's processes by {part.tracker}"
    warnings = [f"{where}: what detaches itself may outlive its job."] if part.tracker not in _SURE else []
    return chosen.model_copy(update={"lease": lease, "worst_micros": worst}), notes, warnings


def _job_lease(lease: Lease, offer: Offer, part: Partition, request: Request) -> tuple[Lease, list[str]]:
    """The lease of a job, cut down to what its cap and its partition allow, and what the plan says of that."""
    gpus = offer.nodes * offer.processes_per_node
    if part.over_s == inf:
        what = f"The cluster ends no job of partition {part.name} whose time is over (OverTimeLimit)."
        raise NoOffer("slurm.no_end", f"{what} No cap would hold.", hint="Name another cluster in config.toml.")
    lease = lease.model_copy(update={"kill_allowance_s": lease.kill_allowance_s + ceil(part.over_s)})
    cap_s = inf if request.choices.max_gpu_hours is None else request.choices.max_gpu_hours * SECONDS_PER_HOUR / gpus
    if request.max_cost_micros is not None:
        cap_s = min(cap_s, seconds_within(request.max_cost_micros, offer.rate_micros_per_hour))
    most_s = min(cap_s - lease.kill_allowance_s, part.longest_s)
    over_s = ceil(max(0.0, lease.total_s - most_s))
    if over_s >= lease.train_s:
        which = "The cap" if cap_s < part.longest_s else f"The limit of partition {part.name}"
        what = f"{which} leaves {max(0.0, most_s) / 60:.0f} min, and all but training takes "
        what += f"{(lease.total_s - lease.train_s) / 60:.0f} min."
        raise NoOffer("slurm.no_time", what, hint="Raise the cap, or name another partition in config.toml.")
    lease = lease.model_copy(update={"train_s": lease.train_s - over_s, "queue_s": request.choices.queue_s or QUEUE_S})
    most = (lease.total_s + lease.kill_allowance_s) * gpus / SECONDS_PER_HOUR
    of_cap = "" if request.choices.max_gpu_hours is None else f" of the {request.choices.max_gpu_hours:g} allowed"
    begins = "It takes" if offer.rate_micros_per_hour else "It is not metered:"
    told = [
        f"{begins} at most {most:.2f}{of_cap} GPU-hours, counted from its start.",
        f"It may wait {format_duration(lease.queue_s)} in the queue, which counts for nothing.",
    ]
    return lease, told


def box_offer(request: Request, need: GpuNeed, home: Home, clock: Clock) -> tuple[Offer, Login]:
    """The box that --host names as an offer, at the user's price, and how it is logged in to."""
    if not request.host:
        hint = "Name it: --host ubuntu@203.0.113.7 (and --price-per-hour, so that the cap can hold)."
        raise UsageError("host.missing", "--provider ssh needs a --host.", hint=hint)
    login = parse_host(request.host)
    rate = request.price_micros_per_hour or usd(0)
    if rate:
        _demand_cap(request)
    box = SshBox(login.host, login.port, login.user, rate, need)
    # Nobody may rent out two of a card that a desk has two of: then what is known of one, in its cheapest form.
    known = offers_for(box.need) or sorted(rows_for(box.need), key=lambda row: row.rate_micros_per_hour)
    return SshProvider(home, clock, box).offers(box.need, known)[0], login


def _demand_cap(request: Request) -> None:
    if request.max_cost_micros is None:
        raise UsageError("cap.missing", "A run that can spend money needs a cap.", hint="Give one: --max-cost 25.")


def box_warnings(offer: Offer) -> list[str]:
    """What a person should know who trains on a box of their own."""
    unpriced = "No --price-per-hour was given: it is counted as free, and no cap holds."
    return ["To shut the box down is yours; nothing here can.", *([] if offer.rate_micros_per_hour else [unpriced])]


def _plan_on(
    offer: Offer,
    request: Request,
    run: str,
    mode: Mode,
    resolved: ResolvedRecipe,
    data: DataSummary,
    home: Home,
) -> Plan:
    """The plan of a run on the one machine that there is; NoOffer when it cannot train it, or not under the cap."""
    priors, damage = load_priors(home)
    uplink = uplink_of(request, priors)
    load, _ = load_for(request, resolved, data, uplink)
    load = replace(load, setup_s=setup_limit_s(resolved.tables, request.choices, is_rented=False))
    cap = request.max_cost_micros if mode is Mode.PAID else None
    found = candidates(
        [offer],
        resolved,
        load,
        cap=cap,
        hours=request.hours,
        vocab_size=data.vocab_size,
        cpu_cores=os.cpu_count() or 1,
        priors=priors,
        data_sha256=data.sha256,
    )
    chosen = choose(found, load, cap=cap)
    warnings = (*_part(chosen), *([damage] if damage else []))
    return build_plan(request, run, mode, resolved, chosen, data, uplink=uplink, warnings=warnings)


def _part(chosen: Candidate) -> list[str]:
    """How far a run gets where the time to train does not hold all of it."""
    if chosen.finishes or chosen.reach is None or chosen.lease is None:
        return []
    return [
        f"The {format_duration(chosen.lease.train_s)} to train holds a part: it gets to {reach_words(chosen.reach)}."
    ]
