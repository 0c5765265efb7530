"""What is due after a step, whichever loop took it: a line, an evaluation, samples, a checkpoint, or the end."""

from __future__ import annotations

import gc
import math
import statistics
import time

from trainer.answers import write_samples
from trainer.device import memory_peak_bytes, peak_flops
from trainer.errors import NonFinite
from trainer.evaluate import token_bytes, validation
from trainer.events import UNKNOWN_S
from trainer.hellaswag import accuracy
from trainer.resume import snapshot
from trainer.run import Run
from trainer.step import StepResult

__all__ = ["Due", "finish_saving", "make_what_is_owed", "save"]

LEAST_PATIENCE_S = 120.0
"""How long a step may take, at least, before the trainer is taken for stuck."""


class Due:
    """Counts the steps of a run and does what the recipe wants after each."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._durations: list[float] = []
        self._untold: StepResult | None = None

    def after(self, result: StepResult, step_s: float) -> str | None:
        """Count the step that was taken in `step_s` seconds and do what is due; return "signal" where all must end."""
        run, train, progress = self._run, self._run.recipe.train, self._run.progress
        self._durations.append(step_s)
        run.reporter.beat(max(LEAST_PATIENCE_S, 5 * step_s))
        progress.step, progress.loss, progress.val_loss = progress.step + 1, result.loss, None
        step, last = progress.step, progress.step == train.steps
        if run.writer is not None:
            run.writer.check()
        if run.compile_cache is not None:
            run.compile_cache.report(run.reporter, step)
        self._untold = result
        if step == 1 or last or result.stop_asked or step % train.log_every == 0:
            self.tell()
        if result.stop_asked and not last:
            return _save_and_stop(run)
        if _is_judged(run) and not _evaluate(run):
            return _save_and_stop(run)
        if _is_kept(run):
            save(run)
            write_samples(run)
        return None

    def tell(self) -> None:
        """Report the step that was taken last, unless that has been done: what is saved is of a step that was told."""
        if self._untold is not None:
            _report_step(self._run, self._untold, statistics.median(self._durations))
            self._durations.clear()
            self._untold = None


def _is_kept(run: Run) -> bool:
    """Tell whether a checkpoint with samples is due after the step that was taken last."""
    step, train = run.progress.step, run.recipe.train
    return step == train.steps or step % train.checkpoint_every == 0


def _is_judged(run: Run) -> bool:
    """Tell whether an evaluation is: a checkpoint is judged when it is made, so that the best one is known."""
    return _is_kept(run) or run.progress.step % run.recipe.eval.every == 0


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


def _evaluate(run: Run) -> bool:
    """Evaluate, note and report; False if a stop was asked for before the end: what was found until then stays."""
    run.reporter.beat(UNKNOWN_S)
    began = time.perf_counter()
    tokenizer, stopping, task = run.data.tokenizer, run.stop_asked.is_set, run.translation
    found = validation(
        run.model, run.val_samples, run.eval_windows, run.plan.micro_batch,
        lengths=token_bytes(tokenizer.tokens, tokenizer.eot_id) if task is None else None,
        device=run.device, processes=run.processes, stopping=stopping,
    )  # fmt: skip
    if found is None:
        return False
    if not math.isfinite(found.val_loss):
        raise NonFinite(f"after step {run.progress.step} the validation loss is {found.val_loss}; nothing was saved")
    run.progress.val_loss, right = found.val_loss, None
    if run.hellaswag:
        right = accuracy(run.gpt, run.hellaswag, device=run.device, processes=run.processes, stopping=stopping)
    figures = {
        "val_loss": found.val_loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "eval_tokens": run.eval_windows * run.recipe.model.context if task is None else task.eval_tokens,
        "hellaswag": right,
        "hellaswag_items": 0 if right is None else len(run.hellaswag),
        "eval_s": time.perf_counter() - began,
    }
    run.reporter.eval(run.progress.step, figures)
    return right is not None or not run.hellaswag


def save(run: Run) -> None:
    """Start to save a checkpoint, unless this step's is already there."""
    if run.saved_step == run.progress.step:
        return
    run.reporter.beat(UNKNOWN_S)
    compiled = None if run.compile_cache is None else run.compile_cache.renewed(run.device.torch)
    if run.writer is not None:
        run.writer.save(snapshot(run), run.progress.val_loss, compiled)
    elif run.parallel.is_collective:
        snapshot(run).drop()
    run.saved_step = run.progress.step
    gc.collect()


def make_what_is_owed(run: Run) -> None:
    """Evaluate the checkpoint resumed from and make its samples, where its process was ended before they were due."""
    step, store = run.progress.step, run.writer.store() if run.writer is not None else None
    is_here = store is not None and store.latest == step
    if step and _is_judged(run) and run.progress.val_loss is None:
        _evaluate(run)
        if store is not None and is_here and run.progress.val_loss is not None:
            store.judge(run.progress.val_loss)

    def are_owed() -> bool:
        return store is not None and is_here and not store.has_samples(step)

    if step and _is_kept(run) and run.processes.from_first(are_owed):
        write_samples(run)


def finish_saving(run: Run) -> None:
    """Wait until the last checkpoint is on the disk."""
    run.reporter.beat(UNKNOWN_S)
    if run.writer is not None:
        run.writer.store()


def _save_and_stop(run: Run) -> str:
    """Save where training stands; no evaluation, no samples: the sender of SIGTERM may not wait long."""
    save(run)
    return "signal"
