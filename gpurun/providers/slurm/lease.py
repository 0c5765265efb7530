"""Cuts a lease down to what the caps on a job and its partition's time limit allow."""

from __future__ import annotations

from math import ceil, inf

from gpurun.core.cluster import Cluster
from gpurun.core.errors import NoOffer
from gpurun.core.money import SECONDS_PER_HOUR, Micros, seconds_within
from gpurun.core.records import GpuNeed, Offer
from gpurun.core.run_plan import Choices, Lease
from gpurun.providers.slurm.jobs import Partition

QUEUE_S = 24 * SECONDS_PER_HOUR
"""How long a job may wait in the queue if --queue is not given."""
LEAST_BOOT_S, LEAST_COLLECT_S, LEAST_DESTROY_S = 60, 60, 30
# Trackers that find every process of a job; "" if the cluster does not report its tracker.
_COMPLETE_TRACKERS = ("", "proctrack/cgroup")


def lease_of_job(lease: Lease, offer: Offer, part: Partition, choices: Choices, cap: Micros | None) -> Lease:
    """Return the lease, cut down to what the caps and the partition allow; NoOffer if no time is left for training."""
    if part.over_s == inf:
        what = f"The cluster does not terminate jobs in partition {part.name} at their time limit (OverTimeLimit)."
        raise NoOffer(
            "slurm.no_end", f"{what} gpurun could not enforce a cap.", hint="Name another cluster in config.toml."
        )
    lease = lease.model_copy(update={"kill_allowance_s": lease.kill_allowance_s + ceil(part.over_s)})
    cap_s = inf if choices.max_gpu_hours is None else choices.max_gpu_hours * SECONDS_PER_HOUR / offer.processes
    if cap is not None:
        cap_s = min(cap_s, seconds_within(cap, offer.rate_micros_per_hour))
    limit_s = min(part.longest_s, choices.limit_s or inf)
    most_s = min(cap_s - lease.kill_allowance_s, limit_s)
    lease = _shorten_phases(lease, most_s)
    over_s = ceil(max(0.0, lease.total_s - most_s))
    if over_s >= lease.train_s:
        which = "--time" if limit_s < part.longest_s else f"The limit of partition {part.name}"
        which = "The cap" if cap_s < limit_s else which
        what = f"{which} leaves {max(0.0, most_s) / 60:.0f} min, but everything except training takes "
        what += f"{(lease.total_s - lease.train_s) / 60:.0f} min."
        raise NoOffer("slurm.no_time", what, hint="Raise it, or name another partition: --partition.")
    update = {"train_s": lease.train_s - over_s, "queue_s": choices.queue_s or QUEUE_S}
    # If the cap ends the training, no hours are left for a further job that could continue it.
    is_limited = over_s > 0 and limit_s <= cap_s - lease.kill_allowance_s
    return lease.model_copy(update={**update, "limit_s": int(limit_s) if is_limited else 0})


def _shorten_phases(lease: Lease, most_s: float) -> Lease:
    """Return the lease with less time for start, download and teardown if `most_s` is short.

    These phases usually take seconds. Files that are not downloaded when the job ends are fetched from its folder
    later.
    """
    tenth_s = ceil(min(most_s, lease.total_s) / 10)
    update = {
        "boot_s": min(lease.boot_s, max(LEAST_BOOT_S, tenth_s)),
        "collect_s": min(lease.collect_s, max(LEAST_COLLECT_S, 2 * tenth_s)),
        "destroy_s": min(lease.destroy_s, max(LEAST_DESTROY_S, tenth_s)),
    }
    return lease.model_copy(update=update)


def gpu_hours(lease: Lease, offer: Offer) -> float:
    """Return the upper bound of the GPU-hours of a lease; the node-hours if the job has no GPU."""
    return (lease.total_s + lease.kill_allowance_s) * offer.processes / SECONDS_PER_HOUR


def may_outlive(part: Partition) -> bool:
    """Return whether a detached process may outlive its job. That depends on how the cluster tracks processes."""
    return part.tracker not in _COMPLETE_TRACKERS


def too_small_error(part: Partition, cluster: Cluster, need: GpuNeed) -> NoOffer:
    """Return the error for a partition that is too small. It states how many GPUs or nodes there are."""
    where = f"partition {part.name} of {cluster.name}"
    what = f"No node of {where} has {need.count} GPUs; the most is {part.most_gpus}."
    if there := part.nodes_with(need.count):
        each = f" with {need.count} GPUs each" if need.count else ""
        what = f"{need} is {need.nodes} nodes{each}; {where} has only {there} that are up."
    elif not need.count:
        what = f"No node of {where} is up."
    return NoOffer("slurm.too_few", what, hint="Ask for fewer with --gpu, or name another partition in config.toml.")
