"""Saves while training continues, and resumes from the newest intact checkpoint, on any number of processes.

To save, tensors are copied to the host's memory, and a thread writes the copy to disk. To resume, the first process
reads and decides: it uses its own checkpoint, or one that came with the data. It sends the content to the others, which
may be on other machines.
"""

from __future__ import annotations

import collections
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from trainer.distributed import ParallelStrategy, Processes
from trainer.errors import Refused
from trainer.events import Reporter
from trainer.optim import load_optimizer_tensors
from trainer.recipe import Recipe
from trainer.recipe_file import differing_keys
from trainer.shards import TokenData

__all__ = ["CheckpointWriter", "Restored", "Snapshot", "latest_step", "restore_model", "restore_optimizer"]

NamedBytes = tuple[str, bytes]
"""A file: its name below `out/`, and its content."""
_EARLIER = "continue"
"""The folder beside the shards that holds the checkpoint of an earlier run."""
_UNFIT = (KeyError, TypeError, AttributeError, ValueError, RuntimeError)
"""The exceptions that a checkpoint of another model can raise while it is loaded."""


@dataclass(frozen=True)
class Snapshot:
    """The content for a checkpoint of the current step: live tensors by name, which can be iterated over only once.

    A distributed tensor is gathered when the iteration reaches it, so that a loop can release each tensor before the
    next.
    """

    step: int
    model: Iterable[tuple[str, Tensor]]
    optimizer: Iterable[tuple[str, Tensor]]
    state: dict[str, Any]

    def drop(self) -> None:
        """Iterate over all tensors and keep none, because all processes must take part in gathering each of them."""
        collections.deque(itertools.chain(self.model, self.optimizer), maxlen=0)


def _host_memory_for(tensor: Tensor) -> Tensor:
    """Return memory for a copy; it is pinned if the tensor is on a GPU, so that the transfer has full speed."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    except RuntimeError:  # No more memory can be pinned; a slower copy is better than none.
        return torch.empty(tensor.shape, dtype=tensor.dtype)


class CheckpointWriter:
    """Saves one checkpoint at a time; an error in its thread is raised by the next call of any method."""

    def __init__(self, store: CheckpointStore, reporter: Reporter) -> None:
        self._store, self._reporter = store, reporter
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copies: dict[str, Tensor] = {}
        self._waited_s = 0.0

    def store(self) -> CheckpointStore:
        """Return the store after the current save has ended, because two threads must not use it at the same time."""
        began = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._waited_s += time.perf_counter() - began
        self.check()
        return self._store

    @property
    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written to disk."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the thread's error if there is one, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def save(self, live: Snapshot, val_loss: float | None, compile_cache: NamedBytes | None = None) -> None:
        """Copy a snapshot, whose tensors may change afterwards, and write the copy in a thread.

        A compile cache is written first, so that the same manifest lists it. The checkpoint is reported when it is on
        disk; `stall_s` is how many seconds training waited for earlier saves and for the copy.
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
        """Write samples, each a prompt and its text, after the current save has ended, and then report them."""

        def write() -> None:
            names = self._store.write_samples(step, [text for _, text in samples])
            for (prompt, text), name in zip(samples, names, strict=True):
                self._reporter.sample(step, prompt, text, name)

        self._then(write)

    def _then(self, write: Callable[[], None]) -> None:
        """Call `write` in a thread after the current write has ended; after an error, nothing more is written."""
        before = self._thread

        def work() -> None:
            if before is not None:
                before.join()
            try:
                if self._error is None:
                    write()
            except BaseException as error:  # noqa: BLE001  passed to the loop, which raises it
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
            del tensor  # Otherwise it would still exist while the next one is gathered.
        return copies

    def _write(
        self, checkpoint: Checkpoint, val_loss: float | None, cache: NamedBytes | None, began: float, stall_s: float
    ) -> None:
        """Write one checkpoint to disk and report it."""
        if cache is not None:
            self._store.write_compile_cache(checkpoint.step, *cache)
        files, size = self._store.save(checkpoint, val_loss)
        save_s = time.perf_counter() - began
        self._reporter.checkpoint(checkpoint.step, files, size, save_s=save_s, stall_s=stall_s)


@dataclass
class Restored:
    """A restored checkpoint, whose weights are in the model; only the first process has the optimiser's tensors."""

    state: dict[str, Any]
    layout: dict[str, tuple[torch.dtype, torch.Size]]
    optimizer: dict[str, Tensor]


def _refuse_another_run(state: Mapping[str, Any], recipe: Recipe, data: TokenData) -> None:
    """Refuse to resume from a checkpoint of another recipe or other data."""
    keys = differing_keys(state["recipe"], recipe.as_record())
    identity = data.identity()
    keys += [f"data.json: {key}" for key in identity if state["data"].get(key) != identity[key]]
    if keys:
        raise Refused(f"the checkpoint of step {state['step']} was trained with other values of {', '.join(keys)}")


def _unfit(step: int, what: str, error: Exception) -> Refused:
    return Refused(f"the checkpoint of step {step} does not fit the {what}: {error}")


def _earlier_step(data: Path) -> int | None:
    """Return the step of the earlier run's checkpoint beside the shards; None if there is none."""
    place = data / _EARLIER
    if not place.exists():
        return None
    step, _ = CheckpointStore(place).newest_sound()
    if step is None:
        raise Refused(f"{place} has no complete checkpoint to continue from")
    return step


def latest_step(out: Path) -> int:
    """Return the step of the latest checkpoint in the manifest; 0 if there is none to resume from."""
    try:
        return int(json.loads((out / "MANIFEST.json").read_text(encoding="utf-8"))["latest"] or 0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0  # CheckpointStore reports what is wrong with it.


def restore_model(
    model: nn.Module, recipe: Recipe, tokens: TokenData, data: Path, out: Path, processes: Processes, reporter: Reporter
) -> tuple[CheckpointWriter | None, Restored | None]:
    """Restore the model from the newest intact checkpoint, if any; return the writer and the rest of the checkpoint.

    A checkpoint in `out` is used first, else that of an earlier run in the folder `data`. Only the first process has a
    writer.
    """
    found: list[Checkpoint] = []
    writers: list[CheckpointWriter] = []
    latest = processes.to_first(latest_step(out))

    def choose() -> tuple[list[int], dict[str, Any] | None, dict[str, tuple[torch.dtype, torch.Size]]]:
        farthest = max(range(processes.count), key=latest.__getitem__)
        if latest[farthest] > latest[0]:  # A rendezvous may choose another first machine than before.
            found_there = f"the machine of process {farthest} has the checkpoint of step {latest[farthest]} in {out}"
            raise Refused(f"{found_there}, but the first machine, which saves, does not; copy it there")
        store = CheckpointStore(out, keep=recipe.train.keep_checkpoints, every=recipe.train.checkpoint_every)
        step, damaged = store.newest_sound()
        writers.append(CheckpointWriter(store, reporter))
        place, step = (out, step) if step is not None else (data / _EARLIER, _earlier_step(data))
        if step is None:
            return damaged, None, {}
        found.append(read_checkpoint(place, step))
        try:
            _refuse_another_run(found[0].state, recipe, tokens)
            model.load_state_dict(found[0].model)
        except _UNFIT as error:
            raise _unfit(step, "recipe's model", error) from error
        return damaged, found[0].state, {name: (t.dtype, t.shape) for name, t in found[0].optimizer.items()}

    damaged, state, layout = processes.from_first(choose)
    if damaged:
        step = state["step"] if state else 0
        message = f"the checkpoints of steps {damaged} are damaged; resuming from step {step}"
        reporter.warning(step, "checkpoint.damaged", message)
    writer = writers[0] if writers else None
    if state is None:
        return writer, None
    processes.share(model.state_dict().values())
    return writer, Restored(state, layout, found[0].optimizer if found else {})


def restore_optimizer(
    restored: Restored,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    parallel: ParallelStrategy,
    processes: Processes,
    device: torch.device,
    restore_state: Callable[[Mapping[str, Any]], None],
) -> None:
    """Restore the optimiser, whose tensors the first process sends to all, and then the rest of the state.

    Raise Refused in every process if the tensors or the state do not fit this model.
    """
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape) in restored.layout.items():
        known = restored.optimizer.pop(name, None)
        tensor = torch.empty(shape, dtype=dtype, device=device) if known is None else known.to(device)
        processes.share([tensor])
        tensors.update(parallel.split({name: tensor}, model))

    def load() -> None:
        what = "trainer's optimiser"
        try:
            load_optimizer_tensors(model, optimizer, tensors)
            what = "trainer's state"
            restore_state(restored.state)
        except _UNFIT as error:
            raise _unfit(restored.state["step"], what, error) from error

    processes.agree(load)
