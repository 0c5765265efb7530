"""The way to an instance: a folder on this machine, or SSH with a key that was pinned before it booted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path

from gpurun.core.clock import Clock
from gpurun.core.model import Address, Instance
from gpurun.core.paths import RunFolder
from gpurun.core.plan import Plan
from gpurun.machine.base import Machine, Reply, Take
from gpurun.machine.far import FarSide
from gpurun.machine.local import LocalMachine
from gpurun.machine.remote import RemoteMachine

LEAST_S = 2.0
# What a box of one's own keeps of earlier runs' data at most, where the user wants the next run to start warm.
STORE_BYTES = 50_000_000_000


class Reach:
    """Makes the far side of an instance, and keeps it, so that all steps share one connection."""

    def __init__(self, folder: RunFolder, plan: Plan, clock: Clock) -> None:
        self._folder = folder
        self._plan = plan
        self._clock = clock
        self._kept: tuple[Address, FarSide] | None = None

    def __call__(self, instance: Instance) -> FarSide:
        """The way to an instance that has an address; nothing is connected yet."""
        address = instance.address
        if address is None:
            raise RuntimeError(f"{instance.id} has no address yet")
        if self._kept is None or self._kept[0] != address:
            self._kept = (address, self._to(address, instance))
        return self._kept[1]

    def _to(self, address: Address, instance: Instance) -> FarSide:
        if address.kind == "folder":
            return FarSide(LocalMachine(Path(address.folder), token=instance.token), python=sys.executable)
        box = self._plan.box
        machine = RemoteMachine(
            address,
            client_key=Path(box.identity) if box else self._folder.ssh / "client",
            host_key=box.host_key if box else (self._folder.ssh / "host.pub").read_text(encoding="ascii"),
            folder=f".gpurun/{instance.token}",
            clock=self._clock,
        )
        deadline_wall = instance.deadline_wall
        ask_wall = deadline_wall - self._plan.lease.destroy_s if deadline_wall is not None else None
        far = FarSide(_WithinLease(machine, ask_wall, self._clock))
        far.store_bytes = STORE_BYTES if box and self._plan.choices.warm else 0
        return far


class _WithinLease:
    """A machine none of whose calls waits longer than until its end must be asked for: `ask_wall`."""

    def __init__(self, machine: Machine, ask_wall: float | None, clock: Clock) -> None:
        self._machine = machine
        self._clock = clock
        self._end_mono = clock.monotonic() + (ask_wall - clock.wall() if ask_wall is not None else float("inf"))

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        """See `Machine.call`."""
        left_s = max(LEAST_S, self._end_mono - self._clock.monotonic())
        return self._machine.call(argv, stdin=stdin, sink=sink, timeout_s=min(timeout_s, left_s))

    def put(self, path: str, content: bytes) -> None:
        """See `Machine.put`."""
        self._machine.put(path, content)

    def lane(self) -> Machine:
        """See `Machine.lane`; the same end holds for it."""
        lane = copy(self)
        lane._machine = self._machine.lane()
        return lane

    def close(self) -> None:
        """See `Machine.close`."""
        self._machine.close()

    @property
    def round_trip_s(self) -> float:
        """See `Machine.round_trip_s`."""
        return self._machine.round_trip_s
