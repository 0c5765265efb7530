"""Writes checkpoints while training goes on: a copy in the host's memory, then a thread that brings it to the disk."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.events import Reporter

__all__ = ["CheckpointWriter", "Snapshot"]

NamedBytes = tuple[str, bytes]
"""A file: its name below `out/`, its content."""


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint of this moment holds: live tensors by name, which come one after the other and only once.

    A tensor that is in parts is gathered when its turn comes, so a loop over them lets go of each at once.
    """

    step: int
    model: Iterable[tuple[str, Tensor]]
    optimizer: Iterable[tuple[str, Tensor]]
    state: dict[str, Any]

    def drop(self) -> None:
        """Take part where all processes must, and keep nothing."""
        collections.deque(itertools.chain(self.model, self.optimizer), maxlen=0)


def _host_memory_for(tensor: Tensor) -> Tensor:
    """Return room for a copy, pinned if it comes from a card: then it travels at full speed."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    except RuntimeError:  # the system pins no more: a slower copy is better than none
        return torch.empty(tensor.shape, dtype=tensor.dtype)


class CheckpointWriter:
    """Saves one checkpoint at a time; what goes wrong in its thread is raised by the next call of any method."""

    def __init__(self, store: CheckpointStore, reporter: Reporter) -> None:
        self._store, self._reporter = store, reporter
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copies: dict[str, Tensor] = {}
        self._waited_s = 0.0

    def store(self) -> CheckpointStore:
        """Return the store once the save under way has ended: two threads must not use it at once."""
        began = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._waited_s += time.perf_counter() - began
        self.check()
        return self._store

    def check(self) -> None:
        """Raise what went wrong in the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def save(self, live: Snapshot, val_loss: float | None, compile_cache: NamedBytes | None = None) -> None:
        """Copy a snapshot, whose tensors may change from then on, and write it from there.

        A compile cache is written first, so that the same manifest has it.
        The event comes when it is on the disk; `stall_s` is how long training waited for the save before and the copy.
        """
        self.store()
        began = time.perf_counter()
        model, optimizer = self._copied("model.", live.model), self._copied("optim.", live.optimizer)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        stall_s, self._waited_s = self._waited_s + time.perf_counter() - began, 0.0
        copy = Checkpoint(live.step, model, optimizer, live.state)
        self._then(lambda: self._write(copy, val_loss, compile_cache, began, stall_s))

    def write_samples(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Write samples (a prompt, its text) once the save under way has ended, and report them then."""
        self._then(lambda: self._write_samples(step, samples))

    def _then(self, write: Callable[[], None]) -> None:
        """Write something in a thread, after what is being written; nothing more once something went wrong."""
        before = self._thread

        def work() -> None:
            if before is not None:
                before.join()
            try:
                if self._error is None:
                    write()
            except BaseException as error:  # noqa: BLE001  handed over to the loop, which raises it
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _copied(self, prefix: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy tensors to the host, into the memory that the last save used."""
        copies = {}
        for name, tensor in tensors:
            kept = self._copies.get(prefix + name)
            if kept is None:
                kept = self._copies[prefix + name] = _host_memory_for(tensor)
            copies[name] = kept.copy_(tensor.detach(), non_blocking=True)
            del tensor  # or it would still be there while the next one is gathered
        return copies

    def _write(
        self, checkpoint: Checkpoint, val_loss: float | None, cache: NamedBytes | None, began: float, stall_s: float
    ) -> None:
        """Bring one checkpoint to the disk and report it."""
        if cache is not None:
            self._store.write_compile_cache(checkpoint.step, *cache)
        files, size = self._store.save(checkpoint, val_loss)
        save_s = time.perf_counter() - began
        self._reporter.checkpoint(checkpoint.step, files, size, save_s=save_s, stall_s=stall_s)

    def _write_samples(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Bring samples to the disk and report them."""
        names = self._store.write_samples(step, [text for _, text in samples])
        for (prompt, text), name in zip(samples, names, strict=True):
            self._reporter.sample(step, prompt, text, name)
