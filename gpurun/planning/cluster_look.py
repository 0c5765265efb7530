"""Read the state of a user's cluster before a plan for it is made."""

from __future__ import annotations

from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError
from gpurun.core.paths import Home
from gpurun.core.settings import find_cluster
from gpurun.planning.own_box import login_to
from gpurun.providers.base import Unknown
from gpurun.providers.slurm.jobs import Partition
from gpurun.providers.slurm.provider import Site, SlurmProvider


def partitions_of(name: str, home: Home, clock: Clock) -> tuple[str, list[Partition]]:
    """Return a cluster's name and its current partitions. The name "" means the only cluster in config.toml.

    Raise UsageError if there is no such cluster, and SetupError if it does not answer.
    """
    cluster = find_cluster(home, name or None)
    try:
        return cluster.name, SlurmProvider([Site(cluster, login_to(cluster, home, clock))], clock).partitions()
    except Unknown as error:
        raise no_answer(cluster.name, error) from error


def no_answer(cluster: str, error: Unknown) -> SetupError:
    """Return the error for a cluster that could not be queried, with a hint."""
    hint = error.hint or "Try again once its controller answers: sinfo, on the login node."
    return SetupError("slurm.no_answer", f"{cluster} could not be asked: {error}.", hint=hint)
