"""One optimiser step: the gradient of the whole batch, judged before anything moves.

A step that runs out of memory is taken again from its start in smaller portions: the same tokens, the same step.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data import batches, position_seed, sample_starts
from trainer.errors import NonFinite, OutOfMemory, Spiked
from trainer.events import UNKNOWN_S
from trainer.optim import BatchPlan, learning_rate, set_learning_rate
from trainer.run import Run

__all__ = ["StepResult", "Stepper", "cut_smaller", "smaller"]


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step showed; equal in all processes."""

    loss: float
    grad_norm: float
    lr: float
    stop_asked: bool


def smaller(plan: BatchPlan) -> BatchPlan | None:
    """Return the plan with the next smaller micro-batch that divides a process's share; None below one sequence."""
    each = plan.micro_batch * plan.accumulation
    size = next((size for size in range(plan.micro_batch - 1, 0, -1) if each % size == 0), None)
    return None if size is None else BatchPlan(plan.sequences, size, each // size)


def cut_smaller(run: Run, plan: BatchPlan | None) -> None:
    """Let the run take its step again by the smaller plan, once what failed has let go of its tensors.

    Raise OutOfMemory if there is none.
    """
    if plan is None:
        raise OutOfMemory(f"one sequence of context {run.recipe.model.context} does not fit into the card's memory")
    run.reporter.beat(UNKNOWN_S)  # another shape compiles again
    gc.collect()  # it rests during training, and what failed may have left cycles that hold tensors
    if run.device.is_cuda:
        torch.cuda.empty_cache()
    old, run.plan, step = run.plan, plan, run.progress.step
    message = f"memory ran out in step {step + 1}: micro_batch {old.micro_batch} became {plan.micro_batch}"
    message += f", in {plan.accumulation} portions; the step is taken again with the same tokens"
    run.reporter.warning(step, "memory.micro_batch", message)


class Stepper:
    """Takes one optimiser step after the other, each with the next batch."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._feed = self._open_feed()

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._feed.close()

    def _open_feed(self) -> Generator[tuple[Tensor, ...], None, None]:
        """Yield this process's micro-batches from the current step to the last."""
        run, plan = self._run, self._run.plan
        steps = range(run.progress.step, run.recipe.train.steps)
        starts = sample_starts(steps, plan.sequences, plan.micro_batch, run.processes.rank, run.processes.count)
        return batches(lambda start: run.train_samples.read(start, plan.micro_batch), starts, run.device.torch)

    def take(self) -> StepResult:
        """Take one step: accumulate the gradient of the whole batch, clip it, move the weights.

        Before anything has moved, raise NonFinite if the loss or the gradient is NaN or infinite, Spiked if they jumped
        and the recipe stops then, OutOfMemory if there is no smaller micro-batch.
        """
        while (figures := self._gradient()) is None:
            self._cut_smaller()
        run, (loss, asked, norm) = self._run, figures
        lr = learning_rate(run.recipe, run.progress.step)
        if self._may_move(loss, norm):
            set_learning_rate(run.optimizer, lr)
            run.optimizer.step()
        else:
            run.progress.skipped_steps += 1
        run.parallel.clear()
        return StepResult(loss, norm, lr, asked > 0)

    def _gradient(self) -> tuple[float, float, float] | None:
        """Compute the batch's clipped gradient; return (loss, processes asked to stop, norm before clipping).

        None if memory ran out, in any process.
        """
        run = self._run
        loss_sum = torch.zeros((), dtype=torch.float64, device=run.device.torch)
        full = self._accumulate(loss_sum)
        run.parallel.finish()
        if full and not run.processes.several:
            return None
        # Filled on the card: a tensor made here would be copied there, and the copy waits for the whole backward.
        told = [torch.full_like(loss_sum, float(flag)) for flag in (run.stop_asked.is_set(), full)]
        totals = run.processes.summed(torch.stack([loss_sum / run.processes.count, *told]))
        parameters = list(run.model.parameters())
        run.scale.unscale(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, run.recipe.optim.grad_clip or math.inf)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded gradients
        # The one place where the step waits for the card.
        loss, asked, anywhere_full, grad_norm = torch.cat([totals, norm.double().view(1)]).tolist()
        return None if anywhere_full else (loss, asked, grad_norm)

    def _accumulate(self, loss_sum: Tensor) -> bool:
        """Run all micro-steps, adding to `loss_sum` in place; return whether memory ran out."""
        run, plan = self._run, self._run.plan
        try:
            for index in range(plan.accumulation):
                inputs = next(self._feed)
                if run.recipe.model.dropout:
                    # Its masks depend on the position alone: there is no random state to save, and resuming is exact.
                    micro = index * run.processes.count + run.processes.rank
                    torch.manual_seed(position_seed(run.recipe.train.seed, run.progress.step, micro))
                run.parallel.before_micro_step(index == plan.accumulation - 1)
                with run.device.autocast():
                    loss = run.forward(*inputs) / plan.accumulation
                run.scale.scaled(loss).backward()
                loss_sum += loss.detach().double()
        except torch.OutOfMemoryError:
            if run.parallel.is_collective:
                raise
            return True
        return False

    def _cut_smaller(self) -> None:
        """Prepare to take this step again in smaller portions."""
        self.close()
        self._run.parallel.clear()
        cut_smaller(self._run, smaller(self._run.plan))
        self._feed = self._open_feed()

    def _may_move(self, loss: float, norm: float) -> bool:
        """Judge a step before the optimiser moves."""
        run, train = self._run, self._run.recipe.train
        number = run.progress.step + 1
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
