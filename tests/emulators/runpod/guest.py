"""The guest behind a pod: a real container, or only an address."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_ports = itertools.count(10_000)


@dataclass(frozen=True)
class Container:
    """The data with which a container is started: command and environment of its first process, and its GPUs."""

    command: list[str]
    env: dict[str, str]
    gpu: str = ""
    gpu_count: int = 0
    gpu_memory_gb: int = 0


class Guest(Protocol):
    """A running container; `alive` becomes false when its first process ends."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def kill(self) -> None: ...


Boot = Callable[[Container], Guest]


class FakeGuest:
    """A guest that is only an address; a test can end its first process."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.host, self.port, self.alive = "127.0.0.1", next(_ports), True

    def kill(self) -> None:
        self.alive = False


def real_guest(folder: Path) -> Boot:
    """Return a function that starts containers with a real sshd, which run their command.

    Their consoles are in `folder`.
    """
    from tests.emulators.guests import FakeGpu
    from tests.emulators.guests import Guest as RealGuest

    def boot(container: Container) -> Guest:
        gpu = FakeGpu(name=container.gpu, memory_mib=container.gpu_memory_gb * 1024)
        return RealGuest.boot(
            user="root",
            folder=folder / container.env["RUNPOD_POD_ID"],
            port=20_000 + secrets.randbelow(40_000),
            entrypoint=container.command,
            env=container.env,
            gpus=[gpu] * container.gpu_count,
        )

    return boot
