"""Trains a GPT, or a translator: `python -m trainer.train --recipe bundle/recipe.json --data data --out out`.

On several cards: `python -m torch.distributed.run --standalone --nproc-per-node=8 -m trainer.train …`; on several
machines with `--nnodes=2 --node-rank=0 --master-addr=…` instead of `--standalone`. The command goes on from the newest
checkpoint in the out folder (of the first machine). Exit codes: 0 done, or stopped by SIGTERM after a save; 2 recipe
or data refused; 3 NaN or infinity; 4 out of memory; 5 stopped at a spike, after a save; 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import math
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from trainer.answers import write_samples
from trainer.assemble import assemble
from trainer.compile_cache import made_compile_cache
from trainer.config import load_recipe
from trainer.device import choose_device, memory_peak_bytes, peak_flops, prepare_allocator
from trainer.distributed import Processes, joined, leave
from trainer.errors import NonFinite, OutOfMemory, Refused, Spiked, TrainerError
from trainer.evaluate import token_bytes, validation
from trainer.events import Reporter
from trainer.hellaswag import accuracy
from trainer.resume import snapshot
from trainer.run import Progress, Run
from trainer.step import Stepper, StepResult

__all__ = ["main", "train"]

LEAST_PATIENCE_S, UNKNOWN_S = 120.0, 1800.0
"""How long a step may take, at least, and what nobody has timed yet, before the trainer is taken for stuck."""


def train(run: Run) -> str:
    """Run the training loop to its end and return why it ended: "done" or "signal"."""
    run.progress.began_monotonic_s = time.monotonic()
    with contextlib.closing(Stepper(run)) as stepper, _collector_as_it_was():
        try:
            reason = _loop(run, stepper)
        except Spiked:
            _save(run, None)
            _finish_saving(run)
            raise
        except BaseException:
            # A checkpoint that is being written gets to the disk; why the loop ended is more than why that failed.
            with contextlib.suppress(Exception):
                _finish_saving(run)
            raise
        _finish_saving(run)
    return reason


def _loop(run: Run, stepper: Stepper) -> str:
    """Take all steps; log, evaluate, sample and save when each is due."""
    recipe, progress = run.recipe, run.progress
    durations: list[float] = []
    taken = 0
    run.reporter.beat(UNKNOWN_S)  # the first step compiles
    while progress.step < recipe.train.steps:
        began = time.perf_counter()
        result = stepper.take()
        durations.append(time.perf_counter() - began)
        run.reporter.beat(max(LEAST_PATIENCE_S, 5 * durations[-1]))
        progress.step, progress.loss, taken = progress.step + 1, result.loss, taken + 1
        step, last = progress.step, progress.step == recipe.train.steps
        if taken == 1:
            _settle()
        if run.writer is not None:
            run.writer.check()
        if step == 1 or last or step % recipe.train.log_every == 0:
            _report_step(run, result, statistics.median(durations))
            durations.clear()
        if result.stop_asked and not last:
            return _save_and_stop(run)
        # A checkpoint is judged when it is made, so that the best one is known.
        due = last or step % recipe.train.checkpoint_every == 0
        val_loss = None
        if due or step % recipe.eval.every == 0:
            run.reporter.beat(UNKNOWN_S)
            val_loss = _evaluate(run)
            if val_loss is None:
                return _save_and_stop(run)
        if due:
            write_samples(run)
            _save(run, val_loss)
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


def _report_step(run: Run, result: StepResult, step_s: float) -> None:
    """Report the step that has just been taken."""
    tokens_per_s, peak = run.recipe.train.batch_tokens / step_s, peak_flops(run.device)
    flops = run.model.flops_per_token()
    mfu = None if peak is None or flops is None else flops * tokens_per_s / (peak * run.processes.count)
    figures = {
        "loss": result.loss,
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "tokens": run.progress.step * run.recipe.train.batch_tokens,
        "mfu": mfu,
        "memory_peak_bytes": memory_peak_bytes(run.device),
        "skipped_steps": run.progress.skipped_steps,
    }
    run.reporter.step(run.progress.step, figures)


def _evaluate(run: Run) -> float | None:
    """Evaluate and report; return the validation loss, or None if a stop was asked for meanwhile."""
    began = time.perf_counter()
    tokenizer, stopping, task = run.data.tokenizer, run.stop_asked.is_set, run.translation
    found = validation(
        run.model, run.val_samples, run.eval_windows, run.plan.micro_batch,
        lengths=token_bytes(tokenizer.tokens, tokenizer.eot_id) if task is None else None,
        device=run.device, processes=run.processes, stopping=stopping,
    )  # fmt: skip
    if found is None:
        return None
    if not math.isfinite(found.val_loss):
        raise NonFinite(f"after step {run.progress.step} the validation loss is {found.val_loss}; nothing was saved")
    right = None
    if run.hellaswag:
        right = accuracy(run.model, run.hellaswag, device=run.device, processes=run.processes, stopping=stopping)
        if right is None:
            return None
    figures = {
        "val_loss": found.val_loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "eval_tokens": run.eval_windows * run.recipe.model.context if task is None else task.eval_tokens,
        "hellaswag": right,
        "hellaswag_items": len(run.hellaswag),
        "eval_s": time.perf_counter() - began,
    }
    run.reporter.eval(run.progress.step, figures)
    return found.val_loss


def _save(run: Run, val_loss: float | None) -> None:
    """Start to save a checkpoint, unless this step's is already there."""
    if run.saved_step == run.progress.step:
        return
    if run.writer is not None and run.compile_cache is not None:
        made = made_compile_cache()
        run.writer.compile_cache = None if made is None else (run.compile_cache, made)
        run.compile_cache = None
    if run.writer is not None:
        run.writer.save(snapshot(run), val_loss)
    elif run.parallel.is_collective:
        snapshot(run)
    run.saved_step = run.progress.step
    gc.collect()


def _finish_saving(run: Run) -> None:
    """Wait until the last checkpoint is on the disk."""
    if run.writer is not None:
        run.writer.store()


def _save_and_stop(run: Run) -> str:
    """Save where training stands; no evaluation, no samples: whoever sent SIGTERM may not wait long."""
    _save(run, None)
    return "signal"


def _asked_to_stop() -> threading.Event:
    """Return the flag that SIGTERM and Ctrl-C set from now on."""
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)  # where every thread stands, for whoever finds it stuck
    return asked


def _run(arguments: argparse.Namespace, processes: Processes, reporter: Reporter, progress: Progress) -> None:
    """Read the recipe, train, report the end."""
    stop_asked = _asked_to_stop()
    recipe = load_recipe(arguments.recipe)
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
            size = f"micro_batch {run.plan.micro_batch} of context {recipe.model.context}"
            raise OutOfMemory(f"{size} does not fit into the card's memory; halve train.micro_batch") from error
    reporter.stop(progress.step, reason, "", progress.train_s(), progress.loss)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.train", description="Train a GPT on token shards.")
    parser.add_argument("--recipe", type=Path, required=True, help="the resolved recipe, a JSON file")
    parser.add_argument("--data", type=Path, required=True, help="the folder with the shards and data.json")
    parser.add_argument("--out", type=Path, required=True, help="the folder for events, checkpoints and samples")
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
    with contextlib.suppress(OSError):  # a full disk does not change the exit code
        reporter.stop(progress.step, reason, message, progress.train_s(), progress.loss, alone=alone)
    return code


if __name__ == "__main__":
    leave(main())
