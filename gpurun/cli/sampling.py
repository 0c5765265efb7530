"""What `gpurun sample` does: lets a checkpoint of a run continue a text, or translate it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gpurun.cli.control import find
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.weights import ask_trainer, find_checkpoint
from gpurun.core.errors import UsageError
from gpurun.view.safe import safe_line, safe_text

MOST_TOKENS = 100_000
RANGES: Mapping[str, tuple[int, float, str]] = {
    "tokens": (1, MOST_TOKENS, "100"),
    "temperature": (0, 1000, "0.8"),
    "top_k": (0, 1_000_000, "50"),
    "seed": (0, (1 << 63) - 1, "1"),
    "beams": (1, 1000, "4"),
}
"""The least and the most of each setting, and one to try: what is outside is refused before anything is opened."""


def sample_run(session: Session, run: str, prompt: str, *, checkpoint: str, **wanted: float | int | None) -> Result:
    """The prompt and what the model writes after it, or below it where it translates.

    `wanted` are the sampler's settings, None for the recipe's own.
    """
    for name, value in wanted.items():
        least, most, example = RANGES[name]
        if value is not None and not least <= value <= most:  # Nor is what is not a number.
            option = f"--{name.replace('_', '-')}"
            what = f"{option} {value} is not between {least} and {most:,}."
            raise UsageError(f"usage.{name}", what, hint=f"Try {option} {example}.")
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
