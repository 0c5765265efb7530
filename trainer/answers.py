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
from trainer.shards import Prompt

__all__ = ["write_samples"]

LONGEST_S = COLLECTIVE_LIMIT_S / 4
"""How long the others may wait while the first process alone answers."""


def write_samples(run: Run) -> None:
    """Answer each prompt, have it written and told; only the first process does, unless a forward needs them all."""
    together = run.parallel.is_collective
    if run.writer is None and not together:
        return
    others_wait = run.processes.several and not together
    until_s = time.monotonic() + (LONGEST_S if others_wait else math.inf)

    def over() -> bool:
        return run.stop_asked.is_set() or time.monotonic() > until_s

    samples: list[tuple[str, str]] = []
    run.model.eval()
    for number, prompt in enumerate(run.data.prompts):
        run.reporter.beat(UNKNOWN_S)
        if run.processes.any(over(), run.device.torch) if together else over():
            break
        with run.device.autocast():
            # A forward that needs them all goes on until all have agreed to stop.
            text = _answer(run, number, prompt, (lambda: False) if together else over)
        samples.append((prompt.text, text))
    run.model.train()
    if run.writer is not None and samples:
        run.writer.write_samples(run.progress.step, samples)
    if time.monotonic() > until_s:
        told = f"{len(samples)} of {len(run.data.prompts)} prompts were answered, the last one perhaps in part"
        message = f"samples took longer than {LONGEST_S:.0f} s, for which the other processes wait: {told}"
        run.reporter.warning(run.progress.step, "sample.time", message)


def _answer(run: Run, number: int, prompt: Prompt, stopping: Callable[[], bool]) -> str:
    """Return the prompt with what follows it, or its translation."""
    tokenizer, sample = run.data.tokenizer, run.recipe.sample
    if run.translation is not None:
        found = run.translation.translate(
            run.model, [prompt.ids], beams=sample.beams, alpha=sample.length_penalty, most=sample.tokens,
            stopping=stopping,
        )  # fmt: skip
        return run.translation.text(found[0].ids)
    seed = position_seed(run.recipe.train.seed, run.progress.step, number)
    ids = generate(run.model, prompt.ids, sample, vocab_size=tokenizer.vocab_size, seed=seed, stopping=stopping)
    return tokenizer.decode(ids)
