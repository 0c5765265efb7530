"""The guest in an instance: a real machine, or only an address."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

_places = itertools.count(2)
_TIMER = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC")
# The name of the GPU in each family of machine types, as nvidia-smi prints it, and its memory in MiB.
_CARDS = {
    "g4dn": ("Tesla T4", 15360), "g5": ("NVIDIA A10G", 23028), "g6": ("NVIDIA L4", 23034),
    "g6e": ("NVIDIA L40S", 46068),
    "p4d": ("NVIDIA A100-SXM4-40GB", 40960), "p4de": ("NVIDIA A100-SXM4-80GB", 81920),
    "p5": ("NVIDIA H100 80GB HBM3", 81559), "p5en": ("NVIDIA H200", 143771), "p6-b200": ("NVIDIA B200", 183359),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """The data with which a guest is booted. The guest calls `on_poweroff` once if it powers itself off."""

    id: str
    type_id: str
    gpu_count: int
    user_data: str
    on_poweroff: Callable[[], None]


class Guest(Protocol):
    """A booted machine."""

    @property
    def host(self) -> str: ...

    @property
    def log(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    def kill(self) -> None: ...


Boot = Callable[[Machine], Guest]


class FakeGuest:
    """A guest that is only an address and the timer in its user-data, which follows the emulator's clock.

    With `hung` the timer never fires, as in a machine whose kernel has stopped.
    """

    def __init__(self, machine: Machine, *, hung: bool = False) -> None:
        place = next(_places)
        self.machine = machine
        self.host = f"127.200.{place // 250 % 250}.{place % 250 + 1}"
        self.alive, self.log = True, ""
        timer = _TIMER.search(machine.user_data)
        self.deadline = None
        if timer and not hung:
            self.deadline = datetime.fromisoformat(timer[1]).replace(tzinfo=UTC).timestamp()

    def tick(self, now: float) -> None:
        """Power the guest off if the time of its timer has come."""
        if self.alive and self.deadline is not None and now >= self.deadline:
            self.power_off()

    def power_off(self) -> None:
        self.alive = False
        self.machine.on_poweroff()

    def kill(self) -> None:
        self.alive = False


def real_guest(folder: Path) -> Boot:
    """Return a function that boots machines with a real sshd, which apply their user-data.

    Their consoles are in `folder`.
    """
    from tests.emulators.guests import FakeGpu
    from tests.emulators.guests import Guest as RealGuest

    def boot(machine: Machine) -> Guest:
        name, memory_mib = _CARDS.get(machine.type_id.partition(".")[0], ("", 0))
        gpus = [FakeGpu(name=name, memory_mib=memory_mib)] * machine.gpu_count
        home = folder / machine.id
        home.mkdir(parents=True)
        return RealGuest.boot(
            user="ubuntu", folder=home, user_data=machine.user_data, gpus=gpus, on_poweroff=machine.on_poweroff
        )

    return boot
