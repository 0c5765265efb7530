"""Trains a GPT, or a translator: `python -m trainer.train --recipe recipes/mini-gpt.toml --data data --out out`.

On several GPUs: `python -m trainer.launch --processes 8 …`; on several machines `python -m torch.distributed.run
--nproc-per-node=8 --nnodes=2 --node-rank=0 --master-addr=… -m trainer.train …`. The command resumes from the newest
checkpoint in the out folder (of the first machine). Exit codes: 0 done, or stopped by SIGTERM after a save; 2 recipe or
data refused; 3 NaN or infinity; 4 out of memory; 5 stopped at a spike, after a save; 6 trainer/launch.py should restart
it; 1 anything else.

The loop, from top to bottom: `train` takes the steps. After each step it does what is due: a line, an evaluation, a
checkpoint with samples, or the end. `main` is the command. trainer/run.py has the three parts that every function here
takes: the setup, the state, and the input and output.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import time
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainer.data import micro_batch_starts, position_seed, read_batches
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
from trainer.errors import NonFinite, Refused, Restart, Spiked, TrainerError
from trainer.evaluate import accuracy, validation
from trainer.events import UNKNOWN_S, Reporter
from trainer.optim import optimizer_tensors, set_rates
from trainer.out_of_memory import ending, is_restarting, retried
from trainer.recipe_file import add_recipe_words, as_planned, read_recipe
from trainer.run import RunIO, Setup, State, StepResult, watch_for_stop
from trainer.saving import Snapshot
from trainer.start import open_run

__all__ = ["main", "train"]

LEAST_PATIENCE_S = 120.0
"""The fewest seconds that a step may take before the trainer counts as stuck."""
LONGEST_SAMPLES_S = COLLECTIVE_LIMIT_S / 4
"""How many seconds the other processes may wait while only the first one answers the prompts."""


def train(setup: Setup, state: State, io: RunIO) -> str:
    """Train to the end and return why it ended: "done" or "signal"."""
    io.reporter.begin_training()
    io.reporter.beat(UNKNOWN_S)  # The first step compiles.
    try:
        catch_up_after_resume(setup, state, io)
        reason = take_steps(setup, state, io)
    except Spiked:
        save(setup, state, io)
        io.finish_saving()
        raise
    except torch.OutOfMemoryError as error:
        # Reported before waiting for the last checkpoint, because other processes wait for this one meanwhile.
        full = ending(setup, state, io)
        with contextlib.suppress(Exception):
            io.finish_saving()
        raise full from error
    except BaseException:
        # Let a save in progress reach the disk; the reason why the loop ended matters more than an error of the save.
        with contextlib.suppress(Exception):
            io.finish_saving()
        raise
    io.finish_saving()
    if reason == "done" and setup.recipe.eval.core:
        score_core(setup, state, io)
    return reason


def take_steps(setup: Setup, state: State, io: RunIO) -> str:
    """Take all remaining steps, and after each do what is due; return why they ended."""
    # The first step may compile for minutes; if a person requested a stop before, those minutes should not be paid for.
    if setup.processes.any(io.stop_requested.is_set(), setup.device.torch):
        return "signal"
    steps = own_steps
    if setup.recipe.train.loop == "huggingface":
        from trainer.huggingface.loop import steps
    with contextlib.closing(steps(setup, state, io)) as taken:
        for result in taken:
            if finish_step(setup, state, io, result):
                return "signal"
    return "done"


def own_steps(setup: Setup, state: State, io: RunIO) -> Generator[StepResult, None, None]:
    """Take a step whenever the next one is requested, until all are taken."""
    first, last = state.step, setup.recipe.train.steps
    if first < last:
        setup.parallel.warm_up(setup.task.train_samples.read(0, state.plan.micro_batch), setup.device)
    try:
        while state.step < last:
            began = time.perf_counter()
            figures, stop_requested = take_step(setup, state, io)
            step_s = time.perf_counter() - began
            if state.step == first:
                # Everything is built: the garbage collector must neither scan it again nor interrupt a step.
                gc.collect()
                gc.freeze()
                gc.disable()
            yield StepResult(figures, stop_requested, step_s)
    except Spiked:
        report_step(setup, state, io)
        raise
    finally:
        io.close_feed()
        gc.unfreeze()
        gc.enable()


def take_step(setup: Setup, state: State, io: RunIO) -> tuple[dict[str, float], bool]:
    """Take one step: accumulate the gradient of the whole batch, clip it, judge it, move the weights.

    Return its loss, rate and norm before clipping, and whether a process was asked to stop; equal in all processes.
    Before anything has moved, raise NonFinite if the loss or the gradient is NaN or infinite, Spiked if they jumped
    and the recipe stops then, OutOfMemory if there is no smaller micro-batch.
    """
    loss, stops, norm = gradient(setup, state, io)
    lr = set_rates(setup.optimizer, setup.recipe, state.step)
    if should_step(setup, state, io, loss, norm):
        setup.optimizer.step()
    else:
        state.skipped_steps += 1
    setup.parallel.clear()
    return {"loss": loss, "lr": lr, "grad_norm": norm}, stops > 0


def gradient(setup: Setup, state: State, io: RunIO) -> tuple[float, float, float]:
    """Compute the batch's clipped gradient; return (loss, processes asked to stop, norm before clipping)."""
    loss_sum = retried(setup, state, io, lambda: accumulate(setup, state, io))
    # Filled on the GPU: a tensor made on the CPU would be copied, and the copy would wait for the whole backward.
    stop_flag = torch.full_like(loss_sum, float(io.stop_requested.is_set()))
    totals = setup.processes.summed(torch.stack([loss_sum / setup.processes.count, stop_flag]))
    state.scale.unscale(setup.model.parameters())
    norm = setup.parallel.clip(setup.recipe.optim.grad_clip or math.inf)
    # The only place where the step waits for the GPU.
    loss, stops, grad_norm = torch.cat([totals, norm.double().view(1)]).tolist()
    return loss, stops, grad_norm


def accumulate(setup: Setup, state: State, io: RunIO) -> Tensor:
    """Run all micro-steps of this process, forward and backward, and return the sum of their losses."""
    recipe, plan, processes = setup.recipe, state.plan, setup.processes
    loss_sum = torch.zeros((), dtype=torch.float64, device=setup.device.torch)
    if io.feed is None:  # This process's micro-batches, from this step to the last.
        steps, samples = range(state.step, recipe.train.steps), setup.task.train_samples
        starts = micro_batch_starts(steps, plan.sequences, plan.micro_batch, processes.rank, processes.count)
        io.feed = read_batches(lambda start: samples.read(start, plan.micro_batch), starts, setup.device.torch)
    for index in range(plan.accumulation):
        inputs = next(io.feed)
        if recipe.model.dropout:
            # The masks depend only on the position: there is no random state to save, and resuming is exact.
            micro = index * processes.count + processes.rank
            torch.manual_seed(position_seed(recipe.train.seed, state.step, micro))
        loss = setup.parallel.loss(inputs, setup.device, is_last=index == plan.accumulation - 1) / plan.accumulation
        state.scale.scaled(loss).backward()
        loss_sum += loss.detach().double()
    return loss_sum


def should_step(setup: Setup, state: State, io: RunIO, loss: float, norm: float) -> bool:
    """Return whether the optimiser should take this step; raise NonFinite or Spiked as `take_step` describes."""
    policy, number = setup.recipe.train.spike, state.step + 1
    overflowed = math.isfinite(loss) and not math.isfinite(norm)
    if not math.isfinite(loss) or not state.scale.update(overflowed):
        raise NonFinite(f"step {number} has loss {loss} and gradient norm {norm}; the weights did not move")
    jump = None if policy == "off" or overflowed else state.spikes.judge(loss, norm)
    if jump and policy == "stop":
        raise Spiked(f"in step {number} {jump}; the weights did not move")
    state.spikes.remember(loss, norm)
    if jump:
        outcome = "the weights did not move" if policy == "skip" else "the step was taken"
        io.reporter.warning(state.step, "train.spike", f"in step {number} {jump}; {outcome}")
    return not overflowed and not (jump and policy == "skip")


def finish_step(setup: Setup, state: State, io: RunIO, result: StepResult) -> bool:
    """Count a step that was taken and do what is due; return whether all must end because of a signal.

    A person who requests a stop must not wait long, so then there is neither an evaluation nor a sample.
    """
    io.durations.append(result.seconds)
    io.reporter.beat(max(LEAST_PATIENCE_S, 5 * result.seconds))
    state.step += 1
    state.loss, state.val_loss = result.figures["loss"], None
    is_last = state.step == setup.recipe.train.steps
    if io.writer is not None:
        io.writer.check()
    if setup.compile_cache is not None:
        setup.compile_cache.report(io.reporter, state.step)
    io.unreported = result.figures
    if state.step == 1 or is_last or result.stop_requested or state.step % setup.recipe.train.log_every == 0:
        report_step(setup, state, io)
    is_cut_short = result.stop_requested and not is_last
    if is_cut_short or (evaluation_is_due(setup, state) and not evaluate(setup, state, io)):
        save(setup, state, io)
        return True
    if checkpoint_is_due(setup, state):
        save(setup, state, io)
        write_samples(setup, state, io)
    return False


def checkpoint_is_due(setup: Setup, state: State) -> bool:
    """Return whether a checkpoint with samples is due after the last step."""
    return state.step == setup.recipe.train.steps or state.step % setup.recipe.train.checkpoint_every == 0


def evaluation_is_due(setup: Setup, state: State) -> bool:
    """Return whether an evaluation is due: at each checkpoint, to know the best one, and every `eval.every` steps."""
    return checkpoint_is_due(setup, state) or state.step % setup.recipe.eval.every == 0


def report_step(setup: Setup, state: State, io: RunIO) -> None:
    """Report the last step, unless it was reported already."""
    if not io.unreported:
        return
    step_s, batch_tokens = statistics.median(io.durations), setup.recipe.train.batch_tokens
    tokens_per_s, peak, flops = batch_tokens / step_s, peak_flops(setup.device), setup.model.flops_per_token()
    mfu = None if peak is None or flops is None else flops * tokens_per_s / (peak * setup.processes.count)
    figures = {
        **io.unreported, "step_s": step_s, "tokens_per_s": tokens_per_s, "tokens": state.step * batch_tokens,
        "mfu": mfu, "memory_peak_bytes": memory_peak_bytes(setup.device), "skipped_steps": state.skipped_steps,
    }  # fmt: skip
    io.reporter.step(state.step, figures)
    io.durations.clear()
    io.unreported = {}


# Compiled code is only for the shapes of training; torch has no types for this decorator.
@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
def evaluate(setup: Setup, state: State, io: RunIO) -> bool:
    """Evaluate, record and report; return False if a stop was requested before the evaluation ended."""
    io.reporter.beat(UNKNOWN_S)
    began, task, right = time.perf_counter(), setup.task, None
    device, processes, stopping = setup.device, setup.processes, io.stop_requested.is_set
    found = validation(
        setup.model, task.val_samples, task.eval_windows, state.plan.micro_batch,
        lengths=task.bytes_of_ids(), device=device, processes=processes, stopping=stopping,
    )  # fmt: skip
    if found is None:
        return False
    if not math.isfinite(found.val_loss):
        raise NonFinite(f"after step {state.step} the validation loss is {found.val_loss}; nothing was saved")
    state.val_loss = found.val_loss
    if task.items:
        right = accuracy(setup.gpt, task.items, device=device, processes=processes, stopping=stopping)
    figures = {
        "val_loss": found.val_loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte,
        "eval_tokens": task.eval_tokens, "hellaswag": right,
        "hellaswag_items": 0 if right is None else len(task.items), "eval_s": time.perf_counter() - began,
    }  # fmt: skip
    io.reporter.eval(state.step, figures)
    return right is not None or not task.items


def save(setup: Setup, state: State, io: RunIO) -> None:
    """Start to save a checkpoint, unless this step's exists already; all processes take part."""
    if io.saved_step == state.step:
        return
    io.reporter.beat(UNKNOWN_S)
    compiled = None if setup.compile_cache is None else setup.compile_cache.renewed(setup.device.torch)
    weights = setup.parallel.whole(setup.model.state_dict())
    moments = setup.parallel.whole(optimizer_tensors(setup.model, setup.optimizer))
    snapshot = Snapshot(state.step, weights, moments, state.as_record(setup))
    if io.writer is not None:
        io.writer.save(snapshot, state.val_loss, compiled)
    else:
        snapshot.drop()
    io.saved_step = state.step
    gc.collect()


@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
def write_samples(setup: Setup, state: State, io: RunIO) -> None:
    """Answer the prompts, and write and report the texts; only the first process does, unless a forward needs all."""
    together, prompts, sample = setup.parallel.is_collective, setup.task.data.prompts, setup.recipe.sample
    if io.writer is None and not together:
        return
    others_wait = setup.processes.several and not together
    until_s = time.monotonic() + (LONGEST_SAMPLES_S if others_wait else math.inf)

    def is_over() -> bool:
        return io.stop_requested.is_set() or time.monotonic() > until_s

    samples: list[tuple[str, str]] = []
    at_once = max(1, state.plan.micro_batch // sample.beams)  # At most as many rows as are known to fit into memory.
    setup.model.eval()
    for first in range(0, len(prompts), at_once):
        io.reporter.beat(UNKNOWN_S)
        if setup.processes.any(is_over(), setup.device.torch) if together else is_over():
            break
        some = prompts[first : first + at_once]
        seeds = [position_seed(setup.recipe.train.seed, state.step, first + index) for index in range(len(some))]
        with setup.device.autocast():
            # A forward that needs all processes continues until all have agreed to stop.
            texts = setup.task.answers(setup.model, some, sample, seeds, (lambda: False) if together else is_over)
        samples += zip((prompt.text for prompt in some), texts, strict=True)
    setup.model.train()
    if io.writer is not None and samples:
        io.writer.write_samples(state.step, samples)
    if time.monotonic() > until_s:
        answered = f"{len(samples)} of {len(prompts)} prompts were answered, some of them possibly in part"
        message = f"samples took longer than {LONGEST_SAMPLES_S:.0f} s, while the other processes waited: {answered}"
        io.reporter.warning(state.step, "sample.time", message)


def catch_up_after_resume(setup: Setup, state: State, io: RunIO) -> None:
    """Evaluate the checkpoint resumed from and write its samples, if the earlier process had not done so."""
    step, store = state.step, io.writer.store() if io.writer is not None else None
    is_here = store is not None and store.latest == step
    if step and evaluation_is_due(setup, state) and state.val_loss is None:
        evaluate(setup, state, io)
        if store is not None and is_here and state.val_loss is not None:
            store.judge(state.val_loss)

    def has_no_samples() -> bool:
        return store is not None and is_here and not store.has_samples(step)

    if step and checkpoint_is_due(setup, state) and setup.processes.from_first(has_no_samples):
        write_samples(setup, state, io)


@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
def score_core(setup: Setup, state: State, io: RunIO) -> None:
    """Answer CORE's tasks after the last step; if a stop is requested before their end, report a warning."""
    from trainer.core_score import FILE, as_record, core_score

    began = time.perf_counter()
    found = core_score(
        setup.gpt, setup.data / FILE, state.plan.micro_batch, device=setup.device, processes=setup.processes,
        stopping=io.stop_requested.is_set, beat=lambda: io.reporter.beat(UNKNOWN_S),
    )  # fmt: skip
    if found is not None:
        io.reporter.core(state.step, as_record(*found) | {"eval_s": time.perf_counter() - began})
        return
    message = "a stop was requested before CORE's tasks were answered; the checkpoint can still be scored"
    io.reporter.warning(state.step, "core.stopped", message)


def _run(arguments: argparse.Namespace, processes: Processes, reporter: Reporter, state: State) -> None:
    """Read the recipe, train, report the end."""
    stop_requested = watch_for_stop()
    recipe = read_recipe(arguments.recipe, overrides=arguments.overrides, rehearse=arguments.rehearse)
    recipe = as_planned(recipe, arguments.micro_batch, arguments.parallel)
    device = choose_device(recipe.train.precision, processes.local_rank, processes.local_count)
    if recipe.hardware.on_cpu != "as_written" and not device.is_cuda:
        # A rented GPU that torch cannot see would be paid for while the CPU trains slowly.
        raise Refused(f'hardware.on_cpu is "{recipe.hardware.on_cpu}": this form needs CUDA, and torch finds none')
    with joined(processes, device.torch):
        run = open_run(
            recipe, arguments.data, arguments.out, processes=processes, device=device, reporter=reporter,
            stop_requested=stop_requested, state=state,
        )  # fmt: skip
        try:
            reason = train(*run)
        except (NonFinite, Spiked):
            # All processes wait here for the first, which saves: torchrun would kill it 30 s after another process has
            # ended.
            processes.agree(lambda: None)
            raise
    reporter.stop(state.step, reason, "", reporter.train_s(), state.loss)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.train", description="Train a GPT on token shards.")
    add_recipe_words(parser)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the shards and data.json")
    parser.add_argument("--out", type=Path, required=True, help="the folder for events, checkpoints and samples")
    room = "sequences at once that fit on the GPU, if the recipe's train.micro_batch is larger"
    parser.add_argument("--micro-batch", type=int, metavar="N", help=room)
    sharing = "how processes hold the model, if the recipe's train.parallel leaves it open"
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), help=sharing)
    arguments = parser.parse_args(argv)
    prepare_allocator()
    processes, state = Processes.from_environment(), State()
    reporter = Reporter(arguments.out, is_first=processes.is_first)
    try:
        _run(arguments, processes, reporter, state)
        return 0
    except TrainerError as error:
        # Errors of the recipe, the data or the loss are the same in all processes.
        alone = not isinstance(error, Refused | NonFinite | Spiked)
        code, reason, message = error.exit_code, error.reason, str(error)
    except Exception as error:  # noqa: BLE001  reported by the event, the traceback and the exit code
        traceback.print_exc()
        alone = True
        code, reason, message = 1, "error", f"{type(error).__name__}: {error}"
    if is_restarting(arguments.out):
        # The run has not ended, and the error of a process that lost a peer is not its cause.
        return Restart.exit_code
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        reporter.stop(state.step, reason, message, reporter.train_s(), state.loss, alone=alone)
    return code


if __name__ == "__main__":
    leave(main())
