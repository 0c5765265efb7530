"""Trains a GPT, or a translator: `python -m trainer.train --recipe recipes/mini-gpt.toml --data data --out out`.

On several cards: `python -m trainer.launch --processes 8 …`; on several machines `python -m torch.distributed.run
--nproc-per-node=8 --nnodes=2 --node-rank=0 --master-addr=… -m trainer.train …`. The command goes on from the newest
checkpoint in the out folder (of the first machine). Exit codes: 0 done, or stopped by SIGTERM after a save; 2 recipe or
data refused; 3 NaN or infinity; 4 out of memory; 5 stopped at a spike, after a save; 6 trainer/launch.py is to begin
again; 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from trainer.assemble import assemble
from trainer.device import choose_device, prepare_allocator
from trainer.distributed import Processes, joined, leave
from trainer.due import Due, finish_saving, make_what_is_owed, save
from trainer.errors import BeginAnew, NonFinite, Refused, Spiked, TrainerError
from trainer.events import UNKNOWN_S, Reporter
from trainer.recipe import Recipe
from trainer.recipe_file import add_recipe_words, read_recipe
from trainer.room import begins_anew, without_room
from trainer.run import Progress, Run
from trainer.step import Stepper

__all__ = ["as_planned", "main", "train"]

LAUNCHER_EVERY_S = 1.0
"""How often a process looks whether torchrun is still there: without it nobody would wait for the end, nor know it."""


def train(run: Run) -> str:
    """Run the training loop to its end and return why it ended: "done" or "signal"."""
    loop = _loop
    if run.recipe.train.loop == "huggingface":
        from trainer.huggingface.loop import loop
    run.progress.began_monotonic_s = time.monotonic()
    run.reporter.beat(UNKNOWN_S)  # the first step compiles
    try:
        make_what_is_owed(run)
        # The first step compiles, perhaps for minutes: a person who asked for an end before it pays for no such step.
        reason = "signal" if run.processes.any(run.stop_asked.is_set(), run.device.torch) else loop(run)
    except Spiked:
        save(run)
        finish_saving(run)
        raise
    except BaseException:
        # A checkpoint that is being written gets to the disk; why the loop ended is more than why that failed.
        with contextlib.suppress(Exception):
            finish_saving(run)
        raise
    finish_saving(run)
    return reason


def _loop(run: Run) -> str:
    """Take all steps, and after each do what is due."""
    due, first = Due(run), run.progress.step
    with contextlib.closing(Stepper(run)) as stepper, _collector_as_it_was():
        while run.progress.step < run.recipe.train.steps:
            began = time.perf_counter()
            try:
                result = stepper.take()
            except Spiked:
                due.tell()
                raise
            step_s = time.perf_counter() - began
            if run.progress.step == first:
                _settle()
            reason = due.after(result, step_s)
            if reason is not None:
                return reason
    return "done"


@contextlib.contextmanager
def _collector_as_it_was() -> Iterator[None]:
    """Let Python's garbage collector be, when training ends, as it was before."""
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def _settle() -> None:
    """After the first step everything is built: let the garbage collector neither look at it again nor stop a step."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _asked_to_stop() -> threading.Event:
    """Return the flag that SIGTERM, Ctrl-C and the death of torchrun set from now on."""
    asked = threading.Event()

    def ask(*_: object) -> None:
        # Event.set holds a lock: a second signal's handler would come in between and wait for it for ever.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        asked.set()

    def watch(launcher: int) -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_EVERY_S)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Started by torchrun, which tells nobody when it is killed.
        threading.Thread(target=watch, args=(os.getppid(),), name="launcher", daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr)  # every thread's stack, if found stuck
    return asked


def as_planned(recipe: Recipe, most: int | None, parallel: Literal["ddp", "fsdp"] | None) -> Recipe:
    """Return the recipe with at most `most` sequences at once, and shared in that way where it leaves that open.

    The steps and their tokens stay.
    """
    train = recipe.train
    if most is not None and most < 1:
        raise Refused(f"--micro-batch {most} is less than one sequence")
    if most is not None and most < train.micro_batch:
        train = replace(train, micro_batch=most)
    if parallel is not None and train.parallel == "auto":
        train = replace(train, parallel=parallel)
    return replace(recipe, train=train)


def _run(arguments: argparse.Namespace, processes: Processes, reporter: Reporter, progress: Progress) -> None:
    """Read the recipe, train, report the end."""
    stop_asked = _asked_to_stop()
    recipe = read_recipe(arguments.recipe, overrides=arguments.overrides, rehearse=arguments.rehearse)
    recipe = as_planned(recipe, arguments.micro_batch, arguments.parallel)
    device = choose_device(recipe.train.precision, processes.local_rank, processes.local_count)
    if recipe.hardware.on_cpu != "as_written" and not device.is_cuda:
        # A rented card that torch cannot see would be paid for while the processor crawls.
        raise Refused(f'hardware.on_cpu is "{recipe.hardware.on_cpu}": this form needs CUDA, and torch finds none')
    with joined(processes, device.torch):
        run = assemble(
            recipe, (arguments.data, arguments.out), processes=processes, device=device, reporter=reporter,
            stop_asked=stop_asked, progress=progress,
        )  # fmt: skip
        try:
            reason = train(run)
        except torch.OutOfMemoryError as error:
            # Not in a step that could be taken again: the optimiser's, an evaluation's or a sharded model's memory.
            raise without_room(run, arguments.out) from error
        except (NonFinite, Spiked):
            # All processes come here, the first once it has saved: torchrun kills it 30 s after any other has left.
            processes.agree(lambda: None)
            raise
    reporter.stop(progress.step, reason, "", progress.train_s(), progress.loss)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.train", description="Train a GPT on token shards.")
    add_recipe_words(parser)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the shards and data.json")
    parser.add_argument("--out", type=Path, required=True, help="the folder for events, checkpoints and samples")
    room = "sequences at once that the card has room for, where the recipe's train.micro_batch asks for more"
    parser.add_argument("--micro-batch", type=int, metavar="N", help=room)
    sharing = "how processes hold the model, where the recipe's train.parallel leaves it open"
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), help=sharing)
    arguments = parser.parse_args(argv)
    prepare_allocator()
    processes, progress = Processes.from_environment(), Progress()
    reporter = Reporter(arguments.out, is_first=processes.is_first)
    try:
        _run(arguments, processes, reporter, progress)
        return 0
    except TrainerError as error:
        # What the recipe, the data or the loss is to one process, it is to all.
        alone = not isinstance(error, Refused | NonFinite | Spiked)
        code, reason, message = error.exit_code, error.reason, str(error)
    except Exception as error:  # noqa: BLE001  told by the event, the traceback and the exit code
        traceback.print_exc()
        alone, code, reason, message = True, 1, "error", f"{type(error).__name__}: {error}"
    if begins_anew(arguments.out):
        # No end, nor is what a process met when it lost one without memory a cause of anything.
        return BeginAnew.exit_code
    with contextlib.suppress(OSError):  # a full disk does not change the exit code
        reporter.stop(progress.step, reason, message, progress.train_s(), progress.loss, alone=alone)
    return code


if __name__ == "__main__":
    leave(main())
