"""What the model makes of the recipe's prompts at a checkpoint: it continues them, or translates them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from trainer.data import position_seed
from trainer.distributed import COLLECTIVE_LIMIT_S
from trainer.events import UNKNOWN_S
from trainer.run import Run
from trainer.sample import generate
from trainer.translation.model import Translator

__all__ = ["write_samples"]

LONGEST_S = COLLECTIVE_LIMIT_S / 4
"""How long the others may wait while the first process alone answers."""


def write_samples(run: Run) -> None:
    """Answer the prompts, have it written and told; only the first process does, unless a forward needs them all."""
    together = run.parallel.is_collective
    if run.writer is None and not together:
        return
    others_wait = run.processes.several and not together
    until_s = time.monotonic() + (LONGEST_S if others_wait else math.inf)

    def over() -> bool:
        return run.stop_asked.is_set() or time.monotonic() > until_s

    samples: list[tuple[str, str]] = []
    run.model.eval()
    for numbers in _at_once(run):
        run.reporter.beat(UNKNOWN_S)
        if run.processes.any(over(), run.device.torch) if together else over():
            break
        with run.device.autocast():
            # A forward that needs them all goes on until all have agreed to stop.
            texts = _answers(run, numbers, (lambda: False) if together else over)
        samples += zip((run.data.prompts[number].text for number in numbers), texts, strict=True)
    run.model.train()
    if run.writer is not None and samples:
        run.writer.write_samples(run.progress.step, samples)
    if time.monotonic() > until_s:
        told = f"{len(samples)} of {len(run.data.prompts)} prompts were answered, the last ones perhaps in part"
        message = f"samples took longer than {LONGEST_S:.0f} s, for which the other processes wait: {told}"
        run.reporter.warning(run.progress.step, "sample.time", message)


def _at_once(run: Run) -> list[range]:
    """Return the prompts' numbers in groups of no more rows than a micro-batch, which the memory is known to hold."""
    prompts, rows = len(run.data.prompts), max(1, run.plan.micro_batch // run.recipe.sample.beams)
    return [range(first, min(first + rows, prompts)) for first in range(0, prompts, rows)]


def _answers(run: Run, numbers: range, stopping: Callable[[], bool]) -> list[str]:
    """Return the prompts of these numbers with what follows them, or their translations."""
    tokenizer, sample = run.data.tokenizer, run.recipe.sample
    prompts = [run.data.prompts[number].ids for number in numbers]
    if run.translation is not None:
        assert isinstance(run.model, Translator)
        found = run.translation.translate(
            run.model, prompts, beams=sample.beams, alpha=sample.length_penalty, most=sample.tokens, stopping=stopping
        )
        return [run.translation.text(one.ids) for one in found]
    seeds = [position_seed(run.recipe.train.seed, run.progress.step, number) for number in numbers]
    written = generate(run.gpt, prompts, sample, seeds=seeds, stopping=stopping)
    return [tokenizer.decode(ids) for ids in written]
