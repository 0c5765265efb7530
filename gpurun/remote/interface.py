"""The boundary to a machine: run a program there, put a file there. Everything else is the agent's task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gpurun.core.errors import ExitCode, GpurunError

# The limit for one call's output on each stream, so that an instance cannot fill the laptop's memory.
MOST_REPLY_BYTES = 32 << 20

_HINTS_OF_ITS_DISK = {
    "disk_full": "On your own machine, free disk space; otherwise request a larger disk: --set hardware.disk_gb=GB.",
    "os_error": "On your own machine, check its disk; otherwise try again.",
}

# Receives bytes as they arrive.
Take = Callable[[bytes], None]


class Sink(Protocol):
    """Receives the answer of one agent call as it arrives: its first line is kept, the rest passed on."""

    line: bytearray

    def __call__(self, block: bytes) -> None:
        """Add the next block; an exception ends the call."""
        ...


NEEDS_PERSON = "ssh.asks"
"""The code of a MachineLost if the login needs an answer from a person, so that retrying cannot help."""


class MachineLost(GpurunError):
    """The machine did not answer. It may be gone, and the request may have been carried out: ask again."""

    def __init__(self, what: str, *, code: str = "machine.lost", hint: str = "") -> None:
        super().__init__(code, what, hint=hint or "gpurun asks again. If that does not help: gpurun attach RUN.")


class FarRefusal(GpurunError):
    """The remote side refused, or sent nonsense. `reason` is its code: disk_full, cut_stream, other_job, nonsense, …"""

    def __init__(self, reason: str, message: str, *, needed_bytes: int | None = None) -> None:
        hint = _HINTS_OF_ITS_DISK.get(reason)
        usual_hint = "See the run's supervisor.log; gpurun destroy RUN ends it."
        super().__init__(f"far.{reason}", message, hint=hint or usual_hint)
        self.reason = reason
        if hint:  # The machine's own problem, not a bug of gpurun.
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
    """A machine that can only be checked for a sign of life."""

    def answers(self, limit_s: float) -> bool:
        """Return whether this very machine, and no other at its address, answers within `limit_s`."""
        ...


class Machine(Protocol):
    """A machine that can run programs in one folder of the instance."""

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        """Run a program in the folder, feed it, and wait for its end.

        With a `sink` its standard output is passed on as it arrives, from another thread, and is not in the
        reply. An exception of `stdin` or `sink` ends the program and is raised here. MachineLost if the machine
        cannot be reached, the time is over, or more than MOST_REPLY_BYTES came back.
        """
        ...

    def put(self, path: str, content: bytes) -> None:
        """Replace a file of the folder as a whole, creating its parents. MachineLost if it cannot be reached."""
        ...

    def lane(self) -> Machine:
        """Return another connection to the same folder, for one more thread; it connects at first use."""
        ...

    def close(self) -> None:
        """Close the connection, if there is one; the next call makes a new one."""
        ...

    @property
    def round_trip_s(self) -> float:
        """Return the measured round-trip time in seconds."""
        ...
