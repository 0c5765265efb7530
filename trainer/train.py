"""Trains a GPT, or a translator: `python -m trainer.train --recipe recipes/mini-gpt.toml --data data --out out`.

On several cards: `python -m trainer.launch --processes 8 …`; on several machines `python -m torch.distributed.run
--nproc-per-node=8 --nnodes=2 --node-rank=0 --master-addr=… -m trainer.train …`. The command goes on from the newest
checkpoint in the out folder (of the first machine). Exit codes: 0 done, or stopped by SIGTERM after a save; 2 recipe or
data refused; 3 NaN or infinity; 4 out of memory; 5 stopped at a spike, after a save; 6 trainer/launch.py is to begin
again; 1 anything else.

The loop, from top to bottom: `train` takes the steps; after each comes what is due, a line, an evaluation, a checkpoint
with samples, or the end. `main` is the command, and trainer/run.py puts together what the loop holds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainer.data import batches, position_seed, sample_starts, smaller
from trainer.distributed import (
    COLLECTIVE_LIMIT_S,
    Processes,
    choose_device,
    joined,
    leave,
    memory_peak_bytes,
    peak_flops,
    prepare_allocator,
)
from trainer.errors import BeginAnew, NonFinite, Refused, Spiked, TrainerError
from trainer.evaluate import accuracy, validation
from trainer.events import UNKNOWN_S, Reporter
from trainer.optim import optimizer_tensors, set_rates
from trainer.recipe_file import add_recipe_words, as_planned, read_recipe
from trainer.room import begins_anew
from trainer.run import Progress, Run, asked_to_stop, kind_of
from trainer.saving import Snapshot

__all__ = ["main", "train"]

LEAST_PATIENCE_S = 120.0
"""How long a step may take, at least, before the trainer is taken for stuck."""
LONGEST_SAMPLES_S = COLLECTIVE_LIMIT_S / 4
"""How long the others may wait while the first process alone answers the prompts."""


def train(run: Run) -> str:
    """Train to the end and return why it ended: "done" or "signal"."""
    run.progress.began_monotonic_s = time.monotonic()
    run.reporter.beat(UNKNOWN_S)  # the first step compiles
    try:
        make_what_is_owed(run)
        # The first step compiles, perhaps for minutes: a person who asked for an end before it pays for no such step.
        if run.processes.any(run.stop_asked.is_set(), run.device.torch):
            reason = "signal"
        elif run.recipe.train.loop == "huggingface":
            from trainer.huggingface.loop import loop

            reason = loop(run, after)
        else:
            reason = take_all_steps(run)
    except Spiked:
        save(run)
        run.finish_saving()
        raise
    except torch.OutOfMemoryError as error:
        # Said before the last checkpoint is waited for: other processes wait for this one meanwhile.
        full = run.without_room()
        with contextlib.suppress(Exception):
            run.finish_saving()
        raise full from error
    except BaseException:
        # A checkpoint that is being written gets to the disk; why the loop ended is more than why that failed.
        with contextlib.suppress(Exception):
            run.finish_saving()
        raise
    run.finish_saving()
    if reason == "done":
        run.score_core()
    return reason


def take_all_steps(run: Run) -> str:
    """Take all steps, and after each do what is due."""
    first = run.progress.step
    if first < run.recipe.train.steps:
        run.parallel.warm_up(run.task.train_samples.read(0, run.plan.micro_batch), run.device)
    try:
        while run.progress.step < run.recipe.train.steps:
            began = time.perf_counter()
            figures, stop_asked = take_step(run)
            step_s = time.perf_counter() - began
            if run.progress.step == first:
                # All is built: the garbage collector is neither to look at it again nor to stop a step.
                gc.collect()
                gc.freeze()
                gc.disable()
            reason = after(run, figures, stop_asked, step_s)
            if reason is not None:
                return reason
    except Spiked:
        tell(run)
        raise
    finally:
        run.close_feed()
        gc.unfreeze()
        gc.enable()
    return "done"


def take_step(run: Run) -> tuple[dict[str, float], bool]:
    """Take one step: accumulate the gradient of the whole batch, clip it, judge it, move the weights.

    Return its loss, rate and norm before clipping, and whether a process is asked to stop; equal in all processes.
    Before anything has moved, raise NonFinite if the loss or the gradient is NaN or infinite, Spiked if they jumped
    and the recipe stops then, OutOfMemory if there is no smaller micro-batch.
    """
    while (found := gradient(run)) is None:
        run.cut_smaller(smaller(run.plan))
    loss, asked, norm = found
    lr = set_rates(run.optimizer, run.recipe, run.progress.step)
    if may_move(run, loss, norm):
        run.optimizer.step()
    else:
        run.progress.skipped_steps += 1
    run.parallel.clear()
    return {"loss": loss, "lr": lr, "grad_norm": norm}, asked > 0


def gradient(run: Run) -> tuple[float, float, float] | None:
    """Compute the batch's clipped gradient; return (loss, processes asked to stop, norm before clipping).

    None if memory ran out and the step can be taken again.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device.torch)
    if accumulate(run, loss_sum):
        return None
    # Filled on the card: a tensor made here would be copied there, and the copy waits for the whole backward.
    stop_flag = torch.full_like(loss_sum, float(run.stop_asked.is_set()))
    totals = run.processes.summed(torch.stack([loss_sum / run.processes.count, stop_flag]))
    parameters = list(run.model.parameters())
    run.scale.unscale(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, run.recipe.optim.grad_clip or math.inf)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded gradients
    # The one place where the step waits for the card.
    loss, asked, grad_norm = torch.cat([totals, norm.double().view(1)]).tolist()
    return loss, asked, grad_norm


def accumulate(run: Run, loss_sum: Tensor) -> bool:
    """Run all micro-steps, adding to `loss_sum` in place; return whether the step is to be taken again with less."""
    plan, processes, seed = run.plan, run.processes, run.recipe.train.seed
    if run.feed is None:  # This process's micro-batches, from this step to the last.
        steps, samples = range(run.progress.step, run.recipe.train.steps), run.task.train_samples
        starts = sample_starts(steps, plan.sequences, plan.micro_batch, processes.rank, processes.count)
        run.feed = batches(lambda start: samples.read(start, plan.micro_batch), starts, run.device.torch)
    try:
        for index in range(plan.accumulation):
            inputs = next(run.feed)
            if run.recipe.model.dropout:
                # Its masks depend on the position alone: there is no random state to save, and resuming is exact.
                micro = index * processes.count + processes.rank
                torch.manual_seed(position_seed(seed, run.progress.step, micro))
            loss = run.parallel.loss(inputs, run.device, is_last=index == plan.accumulation - 1) / plan.accumulation
            run.scale.scaled(loss).backward()
            loss_sum += loss.detach().double()
    except torch.OutOfMemoryError:
        if not run.parallel.retries_a_step:
            raise
        return True
    return False


def may_move(run: Run, loss: float, norm: float) -> bool:
    """Judge a step before the optimiser moves."""
    train, number = run.recipe.train, run.progress.step + 1
    overflowed = math.isfinite(loss) and not math.isfinite(norm)
    if not math.isfinite(loss) or not run.scale.update(overflowed):
        raise NonFinite(f"step {number} has loss {loss} and gradient norm {norm}; the weights did not move")
    jump = None if train.spike == "off" or overflowed else run.spikes.judge(loss, norm)
    if jump and train.spike == "stop":
        raise Spiked(f"in step {number} {jump}; the weights did not move")
    run.spikes.remember(loss, norm)
    if jump:
        done = "the weights did not move" if train.spike == "skip" else "the step was taken"
        run.reporter.warning(run.progress.step, "train.spike", f"in step {number} {jump}; {done}")
    return not overflowed and not (jump and train.spike == "skip")


def after(run: Run, figures: dict[str, float], stop_asked: bool, step_s: float) -> str | None:
    """Count the step that was taken in `step_s` seconds and do what is due; return "signal" where all must end.

    A person who asks for a stop may not wait long: then there is neither evaluation nor sample.
    """
    train, progress = run.recipe.train, run.progress
    run.durations.append(step_s)
    run.reporter.beat(max(LEAST_PATIENCE_S, 5 * step_s))
    progress.step, progress.loss, progress.val_loss = progress.step + 1, figures["loss"], None
    step, last = progress.step, progress.step == train.steps
    if run.writer is not None:
        run.writer.check()
    if run.compile_cache is not None:
        run.compile_cache.report(run.reporter, step)
    run.untold = figures
    if step == 1 or last or stop_asked or step % train.log_every == 0:
        tell(run)
    if (stop_asked and not last) or (run.evaluation_is_due and not evaluate(run)):
        save(run)
        return "signal"
    if run.checkpoint_is_due:
        save(run)
        write_samples(run)
    return None


def tell(run: Run) -> None:
    """Report the step that was taken last, unless that has been done: what is saved is of a step that was told."""
    if not run.untold:
        return
    step_s, batch_tokens = statistics.median(run.durations), run.recipe.train.batch_tokens
    tokens_per_s, peak, flops = batch_tokens / step_s, peak_flops(run.device), run.model.flops_per_token()
    mfu = None if peak is None or flops is None else flops * tokens_per_s / (peak * run.processes.count)
    figures = {
        **run.untold, "step_s": step_s, "tokens_per_s": tokens_per_s, "tokens": run.progress.step * batch_tokens,
        "mfu": mfu, "memory_peak_bytes": memory_peak_bytes(run.device), "skipped_steps": run.progress.skipped_steps,
    }  # fmt: skip
    run.reporter.step(run.progress.step, figures)
    run.durations.clear()
    run.untold = {}


# What is compiled is so for the shapes of training; torch has no types for this.
@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
def evaluate(run: Run) -> bool:
    """Evaluate, note and report; False if a stop was asked for before the end: what was found until then stays."""
    run.reporter.beat(UNKNOWN_S)
    began, step, task, right = time.perf_counter(), run.progress.step, run.task, None
    device, processes, stopping = run.device, run.processes, run.stop_asked.is_set
    found = validation(
        run.model, task.val_samples, task.eval_windows, run.plan.micro_batch,
        lengths=task.bytes_of_ids(), device=device, processes=processes, stopping=stopping,
    )  # fmt: skip
    if found is None:
        return False
    if not math.isfinite(found.val_loss):
        raise NonFinite(f"after step {step} the validation loss is {found.val_loss}; nothing was saved")
    run.progress.val_loss = found.val_loss
    if task.items:
        right = accuracy(run.gpt, task.items, device=device, processes=processes, stopping=stopping)
    figures = {
        "val_loss": found.val_loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte,
        "eval_tokens": task.eval_tokens, "hellaswag": right,
        "hellaswag_items": 0 if right is None else len(task.items), "eval_s": time.perf_counter() - began,
    }  # fmt: skip
    run.reporter.eval(step, figures)
    return right is not None or not task.items


def save(run: Run) -> None:
    """Start to save a checkpoint, unless this step's is already there; all processes take part."""
    if run.saved_step == run.progress.step:
        return
    run.reporter.beat(UNKNOWN_S)
    compiled = None if run.compile_cache is None else run.compile_cache.renewed(run.device.torch)
    progress, model = run.progress, run.parallel.whole(run.model.state_dict())
    state = {
        "v": 1, "step": progress.step, "tokens": progress.step * run.recipe.train.batch_tokens,
        "torch": torch.__version__, "threads": torch.get_num_threads(), "kind": kind_of(run.device),
        "processes": run.processes.count, "loss": progress.loss, "val_loss": progress.val_loss,
        "skipped_steps": progress.skipped_steps, "room": {**run.asked, "fits": run.plan.micro_batch},
        "loss_scale": run.scale.as_record(), "recent": run.spikes.as_record(),
        "recipe": run.recipe.as_record(), "data": run.task.data.identity(),
    }  # fmt: skip
    moments = run.parallel.whole(optimizer_tensors(run.model, run.optimizer))
    snapshot = Snapshot(progress.step, model, moments, state)
    if run.writer is not None:
        run.writer.save(snapshot, progress.val_loss, compiled)
    elif run.parallel.is_collective:
        snapshot.drop()
    run.saved_step = progress.step
    gc.collect()


@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
def write_samples(run: Run) -> None:
    """Answer the prompts, have it written and told; only the first process does, unless a forward needs them all."""
    together, prompts, sample = run.parallel.is_collective, run.task.data.prompts, run.recipe.sample
    if run.writer is None and not together:
        return
    others_wait = run.processes.several and not together
    until_s = time.monotonic() + (LONGEST_SAMPLES_S if others_wait else math.inf)

    def over() -> bool:
        return run.stop_asked.is_set() or time.monotonic() > until_s

    samples: list[tuple[str, str]] = []
    at_once = max(1, run.plan.micro_batch // sample.beams)  # No more rows than the memory is known to hold.
    run.model.eval()
    for first in range(0, len(prompts), at_once):
        run.reporter.beat(UNKNOWN_S)
        if run.processes.any(over(), run.device.torch) if together else over():
            break
        some = prompts[first : first + at_once]
        seeds = [position_seed(run.recipe.train.seed, run.progress.step, first + index) for index in range(len(some))]
        with run.device.autocast():
            # A forward that needs them all goes on until all have agreed to stop.
            texts = run.task.answers(run.model, some, sample, seeds, (lambda: False) if together else over)
        samples += zip((prompt.text for prompt in some), texts, strict=True)
    run.model.train()
    if run.writer is not None and samples:
        run.writer.write_samples(run.progress.step, samples)
    if time.monotonic() > until_s:
        told = f"{len(samples)} of {len(prompts)} prompts were answered, the last ones perhaps in part"
        message = f"samples took longer than {LONGEST_SAMPLES_S:.0f} s, for which the other processes wait: {told}"
        run.reporter.warning(run.progress.step, "sample.time", message)


def make_what_is_owed(run: Run) -> None:
    """Evaluate the checkpoint resumed from and make its samples, where its process was ended before they were due."""
    step, store = run.progress.step, run.writer.store() if run.writer is not None else None
    is_here = store is not None and store.latest == step
    if step and run.evaluation_is_due and run.progress.val_loss is None:
        evaluate(run)
        if store is not None and is_here and run.progress.val_loss is not None:
            store.judge(run.progress.val_loss)

    def are_owed() -> bool:
        return store is not None and is_here and not store.has_samples(step)

    if step and run.checkpoint_is_due and run.processes.from_first(are_owed):
        write_samples(run)


def _run(arguments: argparse.Namespace, processes: Processes, reporter: Reporter, progress: Progress) -> None:
    """Read the recipe, train, report the end."""
    stop_asked = asked_to_stop()
    recipe = read_recipe(arguments.recipe, overrides=arguments.overrides, rehearse=arguments.rehearse)
    recipe = as_planned(recipe, arguments.micro_batch, arguments.parallel)
    device = choose_device(recipe.train.precision, processes.local_rank, processes.local_count)
    if recipe.hardware.on_cpu != "as_written" and not device.is_cuda:
        # A rented card that torch cannot see would be paid for while the processor crawls.
        raise Refused(f'hardware.on_cpu is "{recipe.hardware.on_cpu}": this form needs CUDA, and torch finds none')
    with joined(processes, device.torch):
        run = Run(
            recipe, (arguments.data, arguments.out), processes=processes, device=device, reporter=reporter,
            stop_asked=stop_asked, progress=progress,
        )  # fmt: skip
        try:
            reason = train(run)
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
