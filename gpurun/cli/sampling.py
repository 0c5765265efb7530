"""What `gpurun sample` does: lets a checkpoint of a run continue a text, or translate it."""

from __future__ import annotations

import json

from gpurun.cli.control import find
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.weights import ask_trainer, find_checkpoint
from gpurun.core.errors import UsageError
from gpurun.view.safe import safe_line, safe_text

MOST_TOKENS = 100_000
MOST_SEED = (1 << 63) - 1


def sample_run(session: Session, run: str, prompt: str, *, checkpoint: str, **wanted: float | int | None) -> Result:
    """The prompt and what the model writes after it, or below it where it translates.

    `wanted` are the sampler's settings, None for the recipe's own.
    """
    tokens = wanted.get("tokens")
    if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
        what = f"--tokens {tokens} is not between 1 and {MOST_TOKENS:,}."
        raise UsageError("usage.tokens", what, hint="Try --tokens 100.")
    seed = wanted.get("seed")
    if seed is not None and not 0 <= seed <= MOST_SEED:
        raise UsageError("usage.seed", f"--seed {seed} is not between 0 and {MOST_SEED:,}.", hint="Try --seed 1.")
    sight = find(session, run)
    found = find_checkpoint(sight, checkpoint)
    session.say(f"step {found.step:,}, on this machine")
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in wanted.items() if value is not None]
    where = [str(found.weights), "--data", str(found.data)]
    answer = json.loads(ask_trainer("trainer.generate", *where, *settings, f"--prompt={prompt}"))
    if answer.get("unknown"):
        session.say(f"not in the vocabulary: {safe_line(', '.join(answer['unknown']))}")
    between = "\n" if "beams" in answer else ""
    shown = safe_text(f"{answer['prompt']}{between}{answer['text']}", most_lines=MOST_TOKENS)
    return Result(data={"run": sight.folder.name, **answer}, text="\n".join(shown))
