"""Handles a GPU that runs out of memory.

A checkpoint records which micro-batch fits; before the first checkpoint, a note does. A single process repeats the step
with smaller micro-batches (`retried`). Among several, the process whose memory ran out writes the note `out/room.json`
and ends (`ending`). The others, which may wait for it on their GPUs, see the note and end too (`end_with_the_others`).
Then trainer/launch.py restarts all from the newest checkpoint, at most twice (`micro_batch_of_restart`). Plain torchrun
would not restart them, so the run ends.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.data import BatchPlan, smaller
from trainer.distributed import leave
from trainer.errors import OutOfMemory, Restart, TrainerError
from trainer.events import UNKNOWN_S, Reporter
from trainer.run import RunIO, Setup, State

__all__ = [
    "BEGINNING", "end_with_the_others", "ending", "is_restarting", "micro_batch_of_restart", "read_room",
    "restore_micro_batch", "retried", "shrink_micro_batch",
]  # fmt: skip

BEGINNING = "TRAINER_BEGINNING"
"""The variable that trainer/launch.py sets for the processes that it would restart, to a new value at each start."""
MOST_RESTARTS = 2
"""If a quarter of the micro-batch does not fit, nothing fits."""
LOOK_S = 0.5
"""How many seconds pass between two looks for a note of another process."""
LEAVE_S, MOST_WRITING_S = 4.0, 25.0
"""The most seconds that a process trains, and writes, after the note: torchrun kills it after 30 s."""
_NOTE = "room.json"
_KEYS = {"planned": int, "fits": int, "step": int, "message": str, "beginning": str}
T = TypeVar("T")


def retried(setup: Setup, state: State, io: RunIO, compute: Callable[[], T]) -> T:
    """Return the result of `compute`; if memory runs out in a single process, retry with smaller micro-batches."""
    while True:
        try:
            return compute()
        except torch.OutOfMemoryError:
            if not setup.parallel.retries_a_step:
                raise
        # Only here, after the handler, has the error released the tensors that its traceback held.
        shrink_micro_batch(setup, state, io, smaller(state.plan))


def shrink_micro_batch(setup: Setup, state: State, io: RunIO, plan: BatchPlan | None) -> None:
    """Prepare to repeat the step with the smaller plan and the same tokens; raise OutOfMemory if there is no plan."""
    io.close_feed()
    setup.parallel.clear()
    if plan is None:
        raise _one_sequence_is_too_much(setup)
    io.reporter.beat(UNKNOWN_S)  # Another shape is compiled again.
    gc.collect()  # It is off during training, and the failure may have left cycles that hold tensors.
    if setup.device.is_cuda:
        torch.cuda.empty_cache()
    message = f"memory ran out in step {state.step + 1}: micro_batch {state.plan.micro_batch} became {plan.micro_batch}"
    message += f", in {plan.accumulation} portions; the step is repeated with the same tokens"
    io.reporter.warning(state.step, "memory.micro_batch", message)
    state.plan = plan


def restore_micro_batch(setup: Setup, state: State, room: Mapping[str, Any]) -> None:
    """Use the micro-batch that fitted, if the GPU and the planned micro-batch are the same as then.

    Without this, memory would run out again.
    """
    if room.items() >= setup.planned.items():
        while state.plan.micro_batch > room["fits"] and (plan := smaller(state.plan)):
            state.plan = plan


def _one_sequence_is_too_much(setup: Setup) -> OutOfMemory:
    return OutOfMemory(f"one sequence of context {setup.recipe.model.context} does not fit into the card's memory")


def ending(setup: Setup, state: State, io: RunIO) -> TrainerError:
    """Return the error that ends this process after it ran out of memory and cannot retry.

    It is Restart if the note exists or could be written, so that all processes start again; else OutOfMemory.
    """
    micro_batch, smaller_plan = state.plan.micro_batch, smaller(state.plan)
    full = OutOfMemory(
        f"micro_batch {micro_batch} of context {setup.recipe.model.context} does not fit into the card's memory; "
        f"halve it: --set train.micro_batch={max(1, micro_batch // 2)}"
    )
    if BEGINNING not in os.environ or not setup.processes.several:
        return full
    if is_restarting(setup.out):  # Checked before the stop, which torchrun requests once a process has failed.
        return Restart("memory ran out in another process too")
    if smaller_plan is None:
        return _one_sequence_is_too_much(setup)
    if io.stop_requested.is_set():  # The launcher does not know of the stop request, and there is nothing new to save.
        return full
    message = f"memory ran out after step {state.step}: micro_batch {micro_batch} became {smaller_plan.micro_batch}"
    message += f", in {smaller_plan.accumulation} portions; all processes restart from the newest checkpoint"
    room = {"v": 1, **setup.planned, "fits": smaller_plan.micro_batch, "step": state.step, "message": message}
    # All GPUs may run out of memory together, so each process has its own temporary file; the notes are equal.
    temporary = setup.out / f"{_NOTE}.{os.getpid()}.tmp"
    try:
        temporary.write_text(json.dumps(room | {"beginning": os.environ[BEGINNING]}), encoding="utf-8")
        temporary.replace(setup.out / _NOTE)
    except OSError:  # Without the note the restart would use the same micro-batch.
        return full
    return Restart(message)


def read_room(out: Path) -> dict[str, Any]:
    """Return the note of an out folder; {} if there is no valid note."""
    try:
        room = json.loads((out / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    makes_sense = isinstance(room, dict) and all(type(room.get(key)) is kind for key, kind in _KEYS.items())
    return room if makes_sense else {}


def is_restarting(out: Path) -> bool:
    """Return whether a process of this start has written the note; then all end, and later errors are effects."""
    beginning = os.environ.get(BEGINNING)
    return beginning is not None and read_room(out).get("beginning") == beginning


def end_with_the_others(out: Path, is_writing: Callable[[], bool]) -> None:
    """Start a thread that ends this process soon after a note of this start appears.

    A save in progress may finish first. This process may wait for the others on a GPU, where it receives no signal.
    Without the thread, torchrun would kill it only after half a minute of paid time.
    """

    def watch() -> None:
        while not is_restarting(out):
            time.sleep(LOOK_S)
        seen_s = time.monotonic()
        time.sleep(LEAVE_S)
        while is_writing() and time.monotonic() < seen_s + MOST_WRITING_S:
            time.sleep(LOOK_S)
        leave(Restart.exit_code)

    if BEGINNING in os.environ:
        threading.Thread(target=watch, name="room", daemon=True).start()


def micro_batch_of_restart(out: Path, fits: int, times: int, began_monotonic_s: float) -> int | None:
    """Report that all processes start again, for the `times`-th time, and return the micro-batch from the note.

    Return None, and report the end, if that micro-batch is not below `fits` or memory has run out too often.
    """
    from trainer.saving import latest_step  # Imports all of the trainer, which is needed only if memory runs out.

    room, reporter = read_room(out), Reporter(out, is_first=True, since_monotonic_s=began_monotonic_s)
    is_less = room.get("beginning") == os.environ[BEGINNING] and room["fits"] < fits
    if not is_less or times > MOST_RESTARTS:
        message = "memory ran out again with the smaller micro-batch"
        if is_less:
            message = f"memory ran out {times} times; continue with less: --set train.micro_batch={room['fits']}"
        reporter.stop(room.get("step", 0), OutOfMemory.reason, message, time.monotonic() - began_monotonic_s, None)
        return None
    reporter.beat(UNKNOWN_S)  # The next beat comes after importing torch, reading the shards and restoring the model.
    lost = max(0, room["step"] - latest_step(out))
    reporter.warning(room["step"], "memory.micro_batch", f"{room['message']}; {lost} steps were lost")
    return int(room["fits"])
