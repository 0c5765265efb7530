"""The guest behind an instance: a real machine, or only an address."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_numbers = itertools.count()


@dataclass(frozen=True)
class Machine:
    """The data with which a guest is booted. It calls `on_poweroff` when its own operating system powers it off."""

    id: str
    hostname: str
    authorized_key: str
    user_data: str
    card: str
    gpus: int
    memory_mib: int
    on_poweroff: Callable[[], None]


class Guest(Protocol):
    """A booted machine with an address; its sshd may start later."""

    @property
    def host(self) -> str: ...

    def kill(self) -> None: ...


Boot = Callable[[Machine], Guest]


class FakeGuest:
    """A guest that is only an address; a test can power it off from inside."""

    def __init__(self, machine: Machine) -> None:
        number = next(_numbers)
        self.machine = machine
        self.host = f"127.88.{number // 250 % 250}.{number % 250 + 1}"
        self.alive = True

    def kill(self) -> None:
        self.alive = False

    def poweroff(self) -> None:
        self.alive = False
        self.machine.on_poweroff()


def real_guest(folder: Path, *, sshd_delay_s: float = 0.0, python_path: Sequence[Path] = ()) -> Boot:
    """Return a function that boots machines with a real sshd, which apply their user-data.

    Their consoles are in `folder`. `sshd_delay_s` is how long sshd waits after the boot, while the instance is already
    active. The function raises RuntimeError where guests are not whole machines, because Lambda's answers have no port.
    """
    from tests.emulators.guests import FakeGpu, Faults, whole
    from tests.emulators.guests import Guest as RealGuest

    def boot(machine: Machine) -> Guest:
        if whole():
            raise RuntimeError(whole())
        return RealGuest.boot(
            user="ubuntu",
            folder=folder / machine.id,
            authorized_keys=[machine.authorized_key],
            user_data=machine.user_data,
            gpus=[FakeGpu(name=machine.card, memory_mib=machine.memory_mib)] * machine.gpus,
            on_poweroff=machine.on_poweroff,
            on_halt=machine.on_poweroff,
            faults=Faults(sshd_delay_s=sshd_delay_s),
            strict=True,
            python_path=python_path,
        )

    return boot
