"""The interface to a machine: run a program on it, write a file to it. The agent does everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gpurun.core.errors import ExitCode, GpurunError

# The limit for each output stream of a call, so that a machine cannot fill this computer's memory.
MOST_REPLY_BYTES = 32 << 20

_HINTS_OF_ITS_DISK = {
    "disk_full": "On your own machine, free disk space; otherwise request a larger disk: --set hardware.disk_gb=GB.",
    "os_error": "On your own machine, check its disk; otherwise try again.",
}

# Receives bytes as they arrive.
Take = Callable[[bytes], None]


class Sink(Protocol):
    """Receives the reply to one call of the agent as it arrives: keeps the first line, and passes on the rest."""

    line: bytearray

    def __call__(self, block: bytes) -> None:
        """Add the next block. An exception ends the call."""
        ...


NEEDS_PERSON = "ssh.asks"
"""The code of a MachineLost if the login asks the user something, so that trying again cannot help."""


class MachineLost(GpurunError):
    """The machine did not reply. It may be gone, and the request may have been carried out: ask again."""

    def __init__(self, what: str, *, code: str = "machine.lost", hint: str = "") -> None:
        super().__init__(code, what, hint=hint or "gpurun asks again. If that does not help: gpurun attach RUN.")


class FarRefusal(GpurunError):
    """The agent refused, or sent nonsense. `reason` is its code: disk_full, cut_stream, other_job, nonsense, …"""

    def __init__(self, reason: str, message: str, *, needed_bytes: int | None = None) -> None:
        hint = _HINTS_OF_ITS_DISK.get(reason)
        usual_hint = "See the run's supervisor.log; gpurun destroy RUN ends it."
        super().__init__(f"far.{reason}", message, hint=hint or usual_hint)
        self.reason = reason
        if hint:  # The cause is the machine's state, not a bug of gpurun.
            self.exit_code = ExitCode.SETUP
        self.needed_bytes = needed_bytes


@dataclass(frozen=True)
class Reply:
    """The result of a program on the machine."""

    exit_code: int
    stdout: bytes
    stderr: bytes


@runtime_checkable
class Answers(Protocol):
    """A machine of which this can be checked: does it reply?"""

    def answers(self, limit_s: float) -> bool:
        """Return whether exactly this machine, and no other one at its address, replies within `limit_s`."""
        ...


class Machine(Protocol):
    """A machine that can run programs in one folder of the instance."""

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        """Run a program in the folder, send it its input, and wait for its end.

        With a `sink` the program's standard output is passed on as it arrives, from another thread, and is not in the
        reply. An exception of `stdin` or `sink` ends the program and is raised here. Raise MachineLost if the machine
        cannot be reached, the time is over, or more than MOST_REPLY_BYTES arrive.
        """
        ...

    def put(self, path: str, content: bytes) -> None:
        """Replace a whole file of the folder, and create its parents. Raise MachineLost if that fails."""
        ...

    def lane(self) -> Machine:
        """Return another connection to the same folder, for one more thread. It connects at its first use."""
        ...

    def close(self) -> None:
        """Close the connection, if there is one. The next call makes a new one."""
        ...

    @property
    def round_trip_s(self) -> float:
        """Return the measured round-trip time in seconds."""
        ...
