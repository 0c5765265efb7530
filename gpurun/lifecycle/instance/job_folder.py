"""Use the folder of a finished cluster job. The login node keeps its files until gpurun removes them."""

from __future__ import annotations

from functools import partial

from gpurun.core.errors import GpurunError
from gpurun.core.records import Instance, InstanceState
from gpurun.lifecycle.artifacts.downloader import Downloader
from gpurun.lifecycle.artifacts.inventory import Inventory, due_files, spare_files
from gpurun.lifecycle.artifacts.log_copy import Drain, Tail
from gpurun.lifecycle.artifacts.on_demand import Brief, Salvaged
from gpurun.lifecycle.context import Context
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, Status


def as_finished(instance: Instance) -> Instance:
    """Return the job marked as finished, so that only its folder is used and not the job."""
    return instance.model_copy(update={"state": InstanceState.GONE})


def connect_to_folder(instance: Instance, context: Context) -> FarSide | None:
    """Return a connection to a job's folder, without the job; None if the agent cannot run on the login node."""
    far = context.reach(as_finished(instance))
    try:
        far.install_agent()
    except (FarRefusal, MachineLost):
        return None
    return far


def last_status(instance: Instance, context: Context) -> Status | None:
    """Copy a finished job's log and events to this computer. Return the agent's status; None if it is not known."""
    if not context.plan.lease.queue_s or (far := connect_to_folder(instance, context)) is None:
        return None
    try:
        return _fetch_log(far, context)
    except (GpurunError, OSError):
        return None


def bring_home(instance: Instance, context: Context) -> Salvaged:
    """Download the finished files in the job's folder and verify their digests.

    Raise MachineLost, FarRefusal or CollectFailed.
    """
    far, waits = context.reach(as_finished(instance)), Brief(context.clock)
    try:
        waits.until_done(far.install_agent)
        waits.until_done(partial(_fetch_log, far, context))
        manifest = waits.until_done(partial(far.manifest, MOST_ANNOUNCED_BYTES))
        inventory = Inventory(context.folder)
        inventory.expect(manifest)
        downloads = Downloader(far, inventory, waits, context.clock)
        with far.many_lanes():
            downloads.bring([*due_files(manifest), *spare_files(manifest)])
        return Salvaged(manifest, (*downloads.here.values(),), downloads.missing, (), 0)
    finally:
        far.close()


def _fetch_log(far: FarSide, context: Context) -> Status | None:
    """Copy the rest of log and events. Return the agent's status if the trainer's end is known, else None."""
    tail = Tail(far, context.folder)
    drain = Drain(context.folder, context.clock, context.collect_s, context.plan.job.home_bytes)
    while True:
        poll = tail.bring()
        if not drain.may_continue(poll):
            return None if (poll.status.exit_code, poll.status.signal) == (None, None) else poll.status
