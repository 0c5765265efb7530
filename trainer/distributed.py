"""One process or several: the same loop runs under plain python and under torchrun."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from trainer.errors import Refused

__all__ = ["BEGINNING", "COLLECTIVE_LIMIT_S", "Processes", "joined", "leave"]

BEGINNING = "TRAINER_BEGINNING"
"""The variable by which a process knows that trainer/launch.py would begin again; each beginning of all has a value."""
COLLECTIVE_LIMIT_S = 600.0
"""How long a process may let the others wait for it: then torch ends them all."""
T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Which process this is among how many; `several` is false where no launcher started it."""

    rank: int = 0
    local_rank: int = 0
    count: int = 1
    local_count: int = 1
    several: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process reports and saves."""
        return self.rank == 0

    @classmethod
    def from_environment(cls) -> Processes:
        """Read what torchrun set; RANK decides, since some clouds preset WORLD_SIZE on a lone machine."""
        if "RANK" not in os.environ:
            return cls()
        rank, local_rank, count, local_count = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
        )
        return cls(rank, local_rank, count, local_count, several=True)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all processes, in every process."""
        if self.several:
            dist.all_reduce(values)
        return values

    def any(self, here: bool, device: torch.device) -> bool:
        """Tell whether it holds in any process; the same answer in all of them."""
        return bool(self.summed(torch.tensor(float(here), device=device)).item()) if self.several else here

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give the first process's values to all, in place; they lie where the process group can send them."""
        for tensor in tensors if self.several else ():
            dist.broadcast(tensor, src=0)

    def from_first(self, act: Callable[[], T]) -> T:
        """Run `act` in the first process and return its result everywhere; a refusal is raised everywhere."""
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = act()
            except Refused as refusal:
                outcome[1] = str(refusal)
        if self.several:
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise Refused(outcome[1])
        return outcome[0]  # type: ignore[no-any-return]

    def to_first(self, value: T) -> list[T]:
        """Return every process's value in the first one, by rank; nothing in the others."""
        values: list[Any] = [None] * self.count if self.is_first else []
        if self.several:
            dist.gather_object(value, values or None)
            return values
        return [value]

    def agree(self, act: Callable[[], None]) -> None:
        """Run `act` in every process; where one refuses, all do, so that none waits for another in vain."""
        sentence = None
        try:
            act()
        except Refused as refusal:
            sentence = str(refusal)
        sentences: list[Any] = [sentence]
        if self.several:
            sentences = [None] * self.count
            dist.all_gather_object(sentences, sentence)
        refused = next((s for s in sentences if s is not None), None)
        if refused is not None:
            raise Refused(refused)


@contextlib.contextmanager
def joined(processes: Processes, device: torch.device) -> Iterator[None]:
    """Hold the process group open: NCCL between cards, gloo between CPUs. After a failure the launcher ends it."""
    if processes.several:
        on_cuda = device.type == "cuda"
        if not on_cuda and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes.local_count))
        timeout = timedelta(seconds=COLLECTIVE_LIMIT_S)
        dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timeout, device_id=device if on_cuda else None)
    yield
    if processes.several:
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process with an exit code at once, without tearing anything down: all that is to stay is on the disk.

    To take torch's modules apart takes a second that is paid for. One process of several may even hang there: its
    group's threads may wait for the interpreter lock that a destructor holds.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk does not change the exit code
            stream.flush()
    os._exit(code)
