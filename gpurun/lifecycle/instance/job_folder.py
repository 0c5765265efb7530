"""The folder of a finished job: its login node keeps it, with what the trainer wrote, until gpurun removes it."""

from __future__ import annotations

from functools import partial

from gpurun.core.errors import GpurunError
from gpurun.core.records import Instance, InstanceState
from gpurun.lifecycle.artifacts.downloader import Downloader
from gpurun.lifecycle.artifacts.inventory import Inventory, spare, wanted
from gpurun.lifecycle.artifacts.log_copy import Drain, Tail
from gpurun.lifecycle.artifacts.on_demand import Brief, Salvaged
from gpurun.lifecycle.context import Context
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, Status


def over(instance: Instance) -> Instance:
    """Return the job as a finished one, so that it is reached by its folder alone."""
    return instance.model_copy(update={"state": InstanceState.GONE})


def folder_way(instance: Instance, context: Context) -> FarSide | None:
    """Return the far side of a job's folder without the job; None if the login node does not run the agent."""
    far = context.reach(over(instance))
    try:
        far.install_agent()
    except (FarRefusal, MachineLost):
        return None
    return far


def last_status(instance: Instance, context: Context) -> Status | None:
    """Return how a finished job's training ended, and copy its log and events here; None if that is not known."""
    if not context.plan.lease.queue_s or (far := folder_way(instance, context)) is None:
        return None
    try:
        return _brought_log(far, context)
    except (GpurunError, OSError):
        return None


def bring_home(instance: Instance, context: Context) -> Salvaged:
    """Download the finished files in the folder, digests verified. MachineLost, FarRefusal or CollectFailed."""
    far, waits = context.reach(over(instance)), Brief(context.clock)
    try:
        waits.until_done(far.install_agent)
        waits.until_done(partial(_brought_log, far, context))
        manifest = waits.until_done(partial(far.manifest, MOST_ANNOUNCED_BYTES))
        inventory = Inventory(context.folder)
        inventory.expect(manifest)
        downloads = Downloader(far, inventory, waits, context.clock)
        with far.many_lanes():
            downloads.bring([*wanted(manifest), *spare(manifest)])
        return Salvaged(manifest, (*downloads.here.values(),), downloads.missing, (), 0)
    finally:
        far.close()


def _brought_log(far: FarSide, context: Context) -> Status | None:
    """Copy the rest of log and events; return the agent's status if it says that the trainer has ended."""
    tail = Tail(far, context.folder)
    drain = Drain(context.folder, context.clock, context.collect_s, context.plan.job.home_bytes)
    while True:
        poll = tail.bring()
        if not drain.goes_on(poll):
            return None if (poll.status.exit_code, poll.status.signal) == (None, None) else poll.status
