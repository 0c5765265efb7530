"""Connect to an instance, and decide how long a step retries.

The connection is a folder on this computer, or SSH with a host key that was pinned before the machine booted. A machine
that cannot be reached may still run. Time in which this computer slept does not count as time spent retrying.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import inf

from gpurun.core.clock import Clock
from gpurun.core.errors import CollectFailed, GpurunError, TrainingFailed
from gpurun.core.journal_records import RunState
from gpurun.core.paths import Home, RunFolder
from gpurun.core.places import place_facts
from gpurun.core.records import Address, Instance, InstanceState
from gpurun.core.retry import Retry
from gpurun.core.run_plan import Plan
from gpurun.core.settings import find_cluster
from gpurun.lifecycle.artifacts.downloader import Waits
from gpurun.lifecycle.context import PASSING, RETRY_S, Context
from gpurun.planning.own_box import folder_machine, job_machine, job_step, make_box_machine, python_of
from gpurun.remote.client import PYTHON_IN_IMAGE, FarSide
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.local_machine import LocalMachine
from gpurun.remote.messages import ManifestFile
from gpurun.remote.ssh import RemoteMachine

# The agent may refuse with these reasons and later recover: it was killed (out of memory), or its disk failed.
BRIEF = frozenset({"broken", "os_error"})
MOST_REFUSALS = 20
# If no bytes move for this long, the connection is not slow: it was down, or this computer slept.
AWAY_S = 30.0
# A try lasts at most this long. Any longer time means that this computer slept.
LONGEST_TRY_S = 90.0
LEAST_UNHEARD_S = 900.0
MOVED_S = 180.0
"""Seconds to try to reach a machine that restarted and no longer trains, so that its results can be downloaded."""
HOLD_S = 5.0


class MachineConnector:
    """Creates the connection to an instance and keeps it, so that all steps share it."""

    def __init__(self, folder: RunFolder, plan: Plan, clock: Clock) -> None:
        self._folder = folder
        self._plan = plan
        self._clock = clock
        self._kept: tuple[tuple[Address, bool], FarSide] | None = None

    def __call__(self, instance: Instance) -> FarSide:
        """Return the connection to an instance that has an address. The connection opens at its first use."""
        address = instance.address
        if address is None:
            raise RuntimeError(f"{instance.id} has no address yet")
        place = (address, self._is_job(instance) and instance.state is InstanceState.RUNNING)
        if self._kept is None or self._kept[0] != place:
            self._kept = (place, self._far_side_at(address, instance))
        return self._kept[1]

    def hang_up(self) -> None:
        """Close every connection. A call that waits on a connection ends too; the next call opens a new connection."""
        if self._kept is not None:
            self._kept[1].close()

    def _far_side_at(self, address: Address, instance: Instance) -> FarSide:
        if self._is_job(instance):
            return self._connect_to_job(address, instance)
        if address.kind == "folder":
            place = self._folder.home / address.folder
            return FarSide(LocalMachine(place, token=instance.token), python=self._plan.job.python or sys.executable)
        box, folder, last_mono = self._plan.box, f".gpurun/{instance.token}", self._last_mono(instance)
        if box is not None:
            return FarSide(make_box_machine(box, folder, self._clock, last_mono), python=python_of(box))
        machine = RemoteMachine(
            address,
            client_key=self._folder.ssh / "client",
            host_key=(self._folder.ssh / "host.pub").read_text(encoding="ascii"),
            folder=folder,
            clock=self._clock,
            last_mono=last_mono,
        )
        return FarSide(machine)

    @staticmethod
    def _is_job(instance: Instance) -> bool:
        return place_facts(instance.provider).is_queued

    def _connect_to_job(self, address: Address, instance: Instance) -> FarSide:
        """Return the connection to a cluster's job through its login node, with the Python of the cluster's table.

        If the job does not run, the connection reaches only the job's folder, which the login node also sees.
        """
        home = Home(self._folder.home)
        cluster = find_cluster(home, instance.region)
        is_up = instance.state is InstanceState.RUNNING
        to = job_machine if is_up else folder_machine
        machine = to(cluster, address.folder, instance.token, home, self._clock, self._last_mono(instance))
        private = job_step(cluster, instance, home, self._clock) if is_up else None
        job_python = f"{address.folder}/{PYTHON_IN_IMAGE}" if self._plan.enters_image else ""
        return FarSide(machine, python=cluster.python, private=private, job_python=job_python)

    def _last_mono(self, instance: Instance) -> float:
        """Return the time on the monotonic clock at which the machine's end must be requested."""
        deadline_wall = instance.deadline_wall
        left_s = inf if deadline_wall is None else deadline_wall - self._plan.lease.destroy_s - self._clock.wall()
        return self._clock.monotonic() + left_s


class Patience(Waits):
    """Retries a step's calls until one succeeds, the lease is over, or the instance no longer runs.

    `limit_s` limits the time spent on a slow connection. Gaps of more than AWAY_S in which no bytes move do not count.
    """

    for_room = True

    def __init__(self, state: RunState, context: Context, *, limit_s: float = float("inf")) -> None:
        self._state, self._context, self.limit_s = state, context, limit_s
        self._begun_mono = self._moved_mono = self._tried_mono = context.clock.monotonic()
        self._away_s = self._unheard_s = 0.0
        self._refusals, self._retry = 0, Retry(context.clock, RETRY_S)

    @property
    def left_s(self) -> float:
        """Return the most seconds that one try may take; at least 1."""
        within_s = self.limit_s + self._away_until_now_s() - (self._now_mono() - self._begun_mono)
        return max(1.0, min(within_s, self._context.seconds_left(self._state)))

    def moved(self) -> None:
        """Note that bytes were sent or received."""
        self._away_s = self._away_until_now_s()
        self._moved_mono = self._tried_mono = self._now_mono()
        self._unheard_s, self._refusals = 0.0, 0

    def raise_if_stopped(self) -> None:
        """Raise StopWanted if the user requested a stop."""
        self._context.raise_if_stopped(self._state)

    def require_time(self, file: ManifestFile, why: GpurunError | None) -> None:
        """Raise StopWanted after a stop request, and CollectFailed once the lease is over.

        `why` is the error that kept the file waiting; its message is added.
        """
        self.raise_if_stopped()
        if self._context.seconds_left(self._state) <= 0:
            what = f"The lease was over before {file.name} ({file.bytes:,} bytes) was downloaded."
            hint = "What was downloaded before is kept. Give the next run more --hours, or free space on this disk."
            raise CollectFailed("collect.lease_over", f"{what} {why.what}" if why else what, hint=hint)

    def hold(self, held: Sequence[GpurunError]) -> None:
        """Pause, because the remaining files wait for the local disk or for another process.

        Raise TrainingFailed if the instance no longer runs.
        """
        if why := self._context.is_down(self._state):
            raise make_taken_error(why, is_by_user=self._context.is_ended_by_user(self._state))
        self._context.clock.sleep(min(HOLD_S, max(0.0, self._context.seconds_left(self._state))))

    def wait(self, error: MachineLost | FarRefusal) -> None:
        """Pause after a failed try, or raise if a retry is useless.

        Raise a FarRefusal that is permanent or came too often. Raise TrainingFailed if the limit or the lease is over,
        if the provider reports that the instance no longer runs, or if waiting costs too much.
        """
        clock, down = self._context.clock, None
        if isinstance(error, FarRefusal):
            self._refusals += 1
            if error.reason not in PASSING and (error.reason not in BRIEF or self._refusals > MOST_REFUSALS):
                raise error
        else:
            self._refusals = 0
            down = self._context.is_down(self._state)
            # The provider cannot be reached either: giving up saves nothing, so this time does not count.
            if down is None:
                self._tried_mono = clock.monotonic()
        self._unheard_s += min(clock.monotonic() - self._tried_mono, LONGEST_TRY_S)
        if down:
            raise make_taken_error(down, is_by_user=self._context.is_ended_by_user(self._state))
        if self._is_over():
            raise make_lost_error(error.what)
        self._tried_mono = clock.monotonic()
        self._retry.wait(error, most_s=max(0.0, self._context.seconds_left(self._state)))

    def _is_over(self) -> bool:
        slow_s = self._now_mono() - self._begun_mono - self._away_until_now_s()
        is_late = slow_s > self.limit_s or self._context.seconds_left(self._state) <= 0
        return is_late or self._unheard_s > self._most_unheard_s()

    def _most_unheard_s(self) -> float:
        """Return the seconds to wait for an instance that does not answer although its provider reports that it runs.

        The instance may hang for good, or this network may block SSH. Wait at most as long as the lost work took:
        beyond that, repeating it is cheaper. Checkpoints in a bucket are not lost, so the wait is then short.
        """
        if not self._context.plan.offer.rate_micros_per_hour:
            return float("inf")
        if self._state.outcome == "lost" and self._context.plan.choices.give_up_after_s:
            return 0.0  # The limit that the user set has passed.
        if self._state.outcome == "lost" and self._state.moved:
            return MOVED_S
        if self._state.pushed:
            return LEAST_UNHEARD_S
        paid_s = self._context.paid_s(self._state) - (self._now_mono() - self._moved_mono)
        return max(LEAST_UNHEARD_S, paid_s)

    def _away_until_now_s(self) -> float:
        gap_s = self._now_mono() - self._moved_mono
        return self._away_s + (gap_s if gap_s > AWAY_S else 0.0)

    def _now_mono(self) -> float:
        return self._context.clock.monotonic()


BY_USER = ", by the user whose run it is"
_KEPT = "What was downloaded before is kept. `gpurun receipt` says what was paid."


def make_lost_error(why: str) -> TrainingFailed:
    """Return the error of a step that gives up on an instance that does not answer."""
    return TrainingFailed("machine.lost", f"The instance can no longer be reached: {why}", hint=_KEPT)


def make_taken_error(why: str, *, is_by_user: bool) -> TrainingFailed:
    """Return the error of a step whose instance no longer runs. `why` is the provider's reason."""
    if is_by_user:
        return TrainingFailed("machine.cancelled", f"The instance no longer runs: {why}{BY_USER}.", hint=_KEPT)
    return TrainingFailed("machine.lost", f"The instance no longer runs: {why}.", hint=_KEPT)
