"""Trains a GPT: `python -m trainer.train --recipe bundle/recipe.json --data data --out out`.

On several cards: `python -m torch.distributed.run --standalone --nproc-per-node=8 -m trainer.train …`. The command
goes on from the newest checkpoint in the out folder. Exit codes: 0 done, or stopped by SIGTERM after a save; 2 recipe
or data refused; 3 NaN or infinity; 4 out of memory; 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.config import load_recipe
from trainer.data import batches, position_seed, sample_starts
from trainer.device import choose_device, memory_peak_bytes, peak_flops
from trainer.distributed import Processes, joined, leave
from trainer.errors import NonFinite, OutOfMemory, Refused, TrainerError
from trainer.evaluate import validation_loss
from trainer.events import Reporter
from trainer.optim import learning_rate
from trainer.run import Progress, Run, assemble
from trainer.sample import generate

__all__ = ["main", "train"]

Feed = Generator[tuple[Tensor, Tensor], None, None]


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step showed; equal in all processes."""

    loss: float
    grad_norm: float
    lr: float
    stop_asked: bool


def train(run: Run) -> str:
    """Run the training loop to its end and return why it ended: "done" or "signal"."""
    recipe, progress = run.recipe, run.progress
    progress.began_monotonic_s = time.monotonic()
    with contextlib.closing(_feed(run)) as feed:
        durations: list[float] = []
        while progress.step < recipe.train.steps:
            began = time.perf_counter()
            result = _optimiser_step(run, feed)
            durations.append(time.perf_counter() - began)
            progress.step, progress.loss = progress.step + 1, result.loss
            step, last = progress.step, progress.step == recipe.train.steps
            if step == 1 or last or step % recipe.train.log_every == 0:
                _report_step(run, result, statistics.median(durations))
                durations.clear()
            if result.stop_asked and not last:
                return _save_and_stop(run)
            # A checkpoint is judged when it is made, so that the best one is known.
            due = last or step % recipe.train.checkpoint_every == 0
            val_loss = None
            if due or step % recipe.eval.every == 0:
                val_loss = _evaluate(run)
                if val_loss is None:
                    return _save_and_stop(run)
            if due:
                _write_samples(run)
                _save(run, val_loss)
    return "done"


def _feed(run: Run) -> Feed:
    """Yield this process's micro-batches from the current step to the last."""
    plan, samples, processes = run.plan, run.train_samples, run.processes
    steps = range(run.progress.step, run.recipe.train.steps)
    starts = sample_starts(steps, plan.sequences, plan.micro_batch, processes.rank, processes.count)
    return batches(lambda start: samples.read(start, plan.micro_batch), starts, run.device.torch)


def _optimiser_step(run: Run, feed: Feed) -> StepResult:
    """Take one step: accumulate the gradient of the whole batch, clip it, move the weights.

    Raise NonFinite before anything has moved if the loss or the gradient is NaN or infinite.
    """
    step, recipe, plan = run.progress.step, run.recipe, run.plan
    lr = learning_rate(recipe, step)
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device.torch)
    for index in range(plan.accumulation):
        ids, targets = next(feed)
        # Dropout is a function of the position alone: there is no random state to save, and resuming is exact.
        micro = index * run.processes.count + run.processes.rank
        torch.manual_seed(position_seed(recipe.train.seed, step, micro))
        # DDP decides in forward whether backward will synchronise, so both run inside.
        with _synchronised(run, index == plan.accumulation - 1):
            with run.device.autocast():
                loss = run.forward(ids, targets) / plan.accumulation
            loss.backward()
        loss_sum += loss.detach().double()
    asked = torch.full_like(loss_sum, float(run.stop_asked.is_set()))
    totals = run.processes.summed(torch.stack([loss_sum / run.processes.count, asked]))
    grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), recipe.optim.grad_clip or math.inf)
    # The one place where the step waits for the card.
    mean_loss, stop_asked, norm = torch.stack([*totals, grad_norm.double()]).tolist()
    if not (math.isfinite(mean_loss) and math.isfinite(norm)):
        raise NonFinite(f"step {step + 1} has loss {mean_loss} and gradient norm {norm}; the weights did not move")
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return StepResult(mean_loss, norm, lr, stop_asked > 0)


def _synchronised(run: Run, last: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context of a micro-step: DDP sums gradients over the processes only in the last one of a step."""
    if last or not isinstance(run.forward, torch.nn.parallel.DistributedDataParallel):
        return contextlib.nullcontext()
    return run.forward.no_sync()


def _report_step(run: Run, result: StepResult, step_s: float) -> None:
    """Report the step that has just been taken."""
    tokens_per_s, peak = run.recipe.train.batch_tokens / step_s, peak_flops(run.device)
    mfu = None if peak is None else run.model.flops_per_token() * tokens_per_s / (peak * run.processes.count)
    figures = {
        "loss": result.loss,
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "tokens": run.progress.step * run.recipe.train.batch_tokens,
        "mfu": mfu,
        "memory_peak_bytes": memory_peak_bytes(run.device),
    }
    run.reporter.step(run.progress.step, figures)


def _evaluate(run: Run) -> float | None:
    """Take and report the validation loss; None if a stop was asked for meanwhile."""
    began = time.perf_counter()
    val_loss = validation_loss(
        run.model, run.val_samples, run.eval_windows, run.plan.micro_batch,
        device=run.device, processes=run.processes, stopping=run.stop_asked.is_set,
    )  # fmt: skip
    if val_loss is not None:
        if not math.isfinite(val_loss):
            raise NonFinite(f"after step {run.progress.step} the validation loss is {val_loss}; nothing was saved")
        figures = {"val_loss": val_loss, "perplexity": math.exp(min(val_loss, 700.0))}
        figures |= {"eval_tokens": run.eval_windows * run.recipe.model.context, "eval_s": time.perf_counter() - began}
        run.reporter.eval(run.progress.step, figures)
    return val_loss


def _write_samples(run: Run) -> None:
    """Let the model continue each prompt; only the first process does, the others wait in the next step."""
    if run.store is None:
        return
    step, tokenizer = run.progress.step, run.data.tokenizer
    run.model.eval()
    for number, prompt in enumerate(run.data.prompts):
        with run.device.autocast():
            ids = generate(
                run.model, prompt.ids, run.recipe.sample, vocab_size=tokenizer.vocab_size,
                seed=position_seed(run.recipe.train.seed, step, number), stopping=run.stop_asked.is_set,
            )  # fmt: skip
        text = tokenizer.decode(ids)
        run.reporter.sample(step, prompt.text, text, run.store.write_sample(step, number, text))
    run.model.train()


def _save(run: Run, val_loss: float | None) -> None:
    """Save a checkpoint, unless this step's is already there."""
    if run.store is not None and run.saved_step != run.progress.step:
        began = time.perf_counter()
        files, size = run.store.save(run.snapshot(), val_loss)
        run.reporter.checkpoint(run.progress.step, files, size, time.perf_counter() - began)
    run.saved_step = run.progress.step


def _save_and_stop(run: Run) -> str:
    """Save where training stands; no evaluation, no samples: whoever sent SIGTERM may not wait long."""
    _save(run, None)
    return "signal"


def _asked_to_stop() -> threading.Event:
    """Return the flag that SIGTERM and Ctrl-C set from now on."""
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
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
    processes, progress = Processes.from_environment(), Progress()
    reporter = Reporter(arguments.out, is_first=processes.is_first)
    try:
        _run(arguments, processes, reporter, progress)
        return 0
    except TrainerError as error:
        # What the recipe, the data or the loss is to one process, it is to all.
        alone = not isinstance(error, Refused | NonFinite)
        code, reason, message = error.exit_code, error.reason, str(error)
    except Exception as error:  # noqa: BLE001  told by the event, the traceback and the exit code
        traceback.print_exc()
        alone, code, reason, message = True, 1, "error", f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # a full disk does not change the exit code
        reporter.stop(progress.step, reason, message, progress.train_s(), progress.loss, alone=alone)
    return code


if __name__ == "__main__":
    leave(main())
