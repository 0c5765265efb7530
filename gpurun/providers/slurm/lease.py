"""How long a job of a partition may take: what its caps and the partition's own limit leave of a lease."""

from __future__ import annotations

from math import ceil, inf

from gpurun.core.cluster import Cluster
from gpurun.core.errors import NoOffer
from gpurun.core.money import SECONDS_PER_HOUR, Micros, seconds_within
from gpurun.core.records import GpuNeed, Offer
from gpurun.core.run_plan import Choices, Lease
from gpurun.providers.slurm.jobs import Partition

QUEUE_S = 24 * SECONDS_PER_HOUR
"""How long a job may wait to start, if --queue does not say it."""
LEAST_BOOT_S, LEAST_COLLECT_S, LEAST_DESTROY_S = 60, 60, 30
_SURE = ("", "proctrack/cgroup")


def lease_of_job(lease: Lease, offer: Offer, part: Partition, choices: Choices, cap: Micros | None) -> Lease:
    """Return the lease of a job, cut down to what its caps and its partition allow; NoOffer if none is left."""
    if part.over_s == inf:
        what = f"The cluster does not end jobs of partition {part.name} at their time limit (OverTimeLimit)."
        raise NoOffer("slurm.no_end", f"{what} No cap would hold.", hint="Name another cluster in config.toml.")
    lease = lease.model_copy(update={"kill_allowance_s": lease.kill_allowance_s + ceil(part.over_s)})
    cap_s = inf if choices.max_gpu_hours is None else choices.max_gpu_hours * SECONDS_PER_HOUR / offer.processes
    if cap is not None:
        cap_s = min(cap_s, seconds_within(cap, offer.rate_micros_per_hour))
    limit_s = min(part.longest_s, choices.limit_s or inf)
    most_s = min(cap_s - lease.kill_allowance_s, limit_s)
    lease = _in_short(lease, most_s)
    over_s = ceil(max(0.0, lease.total_s - most_s))
    if over_s >= lease.train_s:
        which = "--time" if limit_s < part.longest_s else f"The limit of partition {part.name}"
        which = "The cap" if cap_s < limit_s else which
        what = f"{which} leaves {max(0.0, most_s) / 60:.0f} min, and everything but training takes "
        what += f"{(lease.total_s - lease.train_s) / 60:.0f} min."
        raise NoOffer("slurm.no_time", what, hint="Raise it, or name another partition: --partition.")
    update = {"train_s": lease.train_s - over_s, "queue_s": choices.queue_s or QUEUE_S}
    # Where the cap ends the training, no other job could continue it.
    is_limited = over_s > 0 and limit_s <= cap_s - lease.kill_allowance_s
    return lease.model_copy(update={**update, "limit_s": int(limit_s) if is_limited else 0})


def _in_short(lease: Lease, most_s: float) -> Lease:
    """Return a lease whose start and end take no more than a part of a short time.

    They usually take seconds, and what is not home when the job is over is downloaded from its folder afterwards.
    """
    tenth_s = ceil(min(most_s, lease.total_s) / 10)
    update = {
        "boot_s": min(lease.boot_s, max(LEAST_BOOT_S, tenth_s)),
        "collect_s": min(lease.collect_s, max(LEAST_COLLECT_S, 2 * tenth_s)),
        "destroy_s": min(lease.destroy_s, max(LEAST_DESTROY_S, tenth_s)),
    }
    return lease.model_copy(update=update)


def gpu_hours(lease: Lease, offer: Offer) -> float:
    """Return the most GPU-hours that a lease takes; of a job without a GPU the hours of its nodes."""
    return (lease.total_s + lease.kill_allowance_s) * offer.processes / SECONDS_PER_HOUR


def may_outlive(part: Partition) -> bool:
    """Return whether a detached process may outlive its job, by how the cluster finds processes."""
    return part.tracker not in _SURE


def too_few(part: Partition, cluster: Cluster, need: GpuNeed) -> NoOffer:
    """Return the refusal that shows, in numbers, what a partition lacks for a need."""
    where = f"partition {part.name} of {cluster.name}"
    what = f"No node of {where} has {need.count} GPUs; the most is {part.most_gpus}."
    if there := part.nodes_with(need.count):
        each = f" with {need.count} GPUs each" if need.count else ""
        what = f"{need} is {need.nodes} nodes{each}; {where} has {there} that work{'s' if there == 1 else ''}."
    elif not need.count:
        what = f"No node of {where} works."
    return NoOffer("slurm.too_few", what, hint="Ask for fewer with --gpu, or name another partition in config.toml.")
