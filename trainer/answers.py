"""What the model makes of the recipe's prompts at a checkpoint: it continues them, or translates them."""

from __future__ import annotations

from trainer.data import position_seed
from trainer.run import Run
from trainer.sample import generate
from trainer.shards import Prompt

__all__ = ["write_samples"]


def write_samples(run: Run) -> None:
    """Answer each prompt, write and report it; only the first process does, unless a forward needs them all."""
    together = run.parallel.is_collective
    if run.writer is None and not together:
        return
    step = run.progress.step
    run.model.eval()
    for number, prompt in enumerate(run.data.prompts):
        if together and run.processes.any(run.stop_asked.is_set(), run.device.torch):
            break
        with run.device.autocast():
            text = _answer(run, number, prompt)
        if run.writer is not None:
            run.reporter.sample(step, prompt.text, text, run.writer.store().write_sample(step, number, text))
    run.model.train()


def _answer(run: Run, number: int, prompt: Prompt) -> str:
    """Return the prompt with what follows it, or its translation."""
    tokenizer, sample = run.data.tokenizer, run.recipe.sample

    def stopping() -> bool:
        return not run.parallel.is_collective and run.stop_asked.is_set()

    if run.translation is not None:
        found = run.translation.translate(
            run.model, [prompt.ids], beams=sample.beams, alpha=sample.length_penalty, most=sample.tokens,
            stopping=stopping,
        )  # fmt: skip
        return run.translation.text(found[0].ids)
    seed = position_seed(run.recipe.train.seed, run.progress.step, number)
    ids = generate(run.model, prompt.ids, sample, vocab_size=tokenizer.vocab_size, seed=seed, stopping=stopping)
    return tokenizer.decode(ids)
