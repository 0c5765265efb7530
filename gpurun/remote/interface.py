"""The boundary to a machine: run a program there, put a file there. Everything else is the agent's work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gpurun.core.errors import ExitCode, GpurunError

# The most that one call may answer on each of its outputs; an instance must not be able to fill the laptop's memory.
MOST_REPLY_BYTES = 32 << 20

_HINTS_OF_ITS_DISK = {
    "disk_full": "On a machine of your own, make room; else ask for a larger disk: --set hardware.disk_gb=GB.",
    "os_error": "On a machine of your own, see to its disk; else try again.",
}

# Takes bytes as they come.
Take = Callable[[bytes], None]


class Sink(Protocol):
    """Takes what one call of the agent answers, as it comes: its first line is kept, the rest passed on."""

    line: bytearray

    def __call__(self, block: bytes) -> None:
        """Take what has come next; what this raises ends the call."""
        ...


NEEDS_PERSON = "ssh.asks"
"""The code of a MachineLost whose login wants what only a person can give: no waiting mends it."""


class MachineLost(GpurunError):
    """The machine did not answer. It may be gone, and what was asked may have been done: ask again."""

    def __init__(self, what: str, *, code: str = "machine.lost", hint: str = "") -> None:
        super().__init__(code, what, hint=hint or "gpurun asks again. If that does not help: gpurun attach RUN.")


class FarRefusal(GpurunError):
    """The far side said no, or nonsense. `reason` is its own code: disk_full, cut_stream, other_job, nonsense, ..."""

    def __init__(self, reason: str, message: str, *, needed_bytes: int | None = None) -> None:
        hint = _HINTS_OF_ITS_DISK.get(reason)
        usual_hint = "See the run's supervisor.log; gpurun destroy RUN ends it."
        super().__init__(f"far.{reason}", message, hint=hint or usual_hint)
        self.reason = reason
        if hint:  # The machine's own trouble, and no bug of gpurun.
            self.exit_code = ExitCode.SETUP
        self.needed_bytes = needed_bytes


@dataclass(frozen=True)
class Reply:
    """What a program on the machine left behind."""

    exit_code: int
    stdout: bytes
    stderr: bytes


@runtime_checkable
class Answers(Protocol):
    """A machine that can be asked for a sign of life alone."""

    def answers(self, limit_s: float) -> bool:
        """Return whether the machine itself, and no other at its address, answers within so many seconds."""
        ...


class Machine(Protocol):
    """A machine that programs can be run on, in one folder that is the instance's own."""

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        """Run a program in the folder, feed it, and wait for its end.

        With a `sink` its standard output is handed over as it comes, from another thread, and none of it is in the
        reply. An error that `stdin` or `sink` raises ends the program and is raised here. MachineLost when the machine
        cannot be reached, the time is over, or more than MOST_REPLY_BYTES came back.
        """
        ...

    def put(self, path: str, content: bytes) -> None:
        """Replace a file of the folder whole; its parents are made. MachineLost when the machine cannot be reached."""
        ...

    def lane(self) -> Machine:
        """Another way to the same folder, for one more thread; it is connected when it is first used."""
        ...

    def close(self) -> None:
        """End the connection, if there is one; the next call makes a new one."""
        ...

    @property
    def round_trip_s(self) -> float:
        """How long the way there and back takes, as far as that was seen."""
        ...
