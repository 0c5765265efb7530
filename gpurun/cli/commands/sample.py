"""Implements `gpurun sample`: lets a checkpoint continue or translate a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from gpurun.cli.options import Checkpoint, UsualRun
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError

MOST_TOKENS, USUAL_TOKENS = 100_000, 1_000
START_S, TOKEN_S = 600, 10
"""Time limits in seconds, for loading a model and for each token. They are long enough for a very slow computer."""
RANGES: Mapping[str, tuple[float, float, str]] = {
    "tokens": (1, MOST_TOKENS, "100"),
    "temperature": (0, 1000, "0.8"),
    "top_k": (0, 1_000_000, "50"),
    "top_p": (0.0001, 1, "0.9"),
    "seed": (0, (1 << 63) - 1, "1"),
    "beams": (1, 1000, "4"),
}
"""The minimum, the maximum and an example of each setting; other values are refused before the model is loaded."""


app = typer.Typer(rich_markup_mode=None)


@verb(
    app,
    "sample",
    examples=['gpurun sample fox-41 --prompt "def "', 'gpurun sample --prompt "the dog sleeps." --beams 4'],
)
def sample(
    session: Session,
    *,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Continue or translate this text.")],
    run: UsualRun = None,
    tokens: Annotated[int | None, typer.Option("--tokens", metavar="N", help="Write this many tokens.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="T", help="Set the randomness; 0 always takes the likeliest."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", help="Draw among the K likeliest tokens; 0: all.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", metavar="P", help="Draw among the likeliest with total probability P."),
    ] = None,
    stop: Annotated[
        str | None, typer.Option("--stop", metavar="TEXT", help=r"Stop at this text; \n is a line break.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="S", help="Draw with this seed, to repeat a text.")
    ] = None,
    beams: Annotated[
        int | None, typer.Option("--beams", metavar="N", help="Translate with this many beams; 1 is greedy.")
    ] = None,
    checkpoint: Checkpoint = "best",
) -> Result:
    """Generate or translate text on this computer with a run's checkpoint and its recipe's defaults."""
    from gpurun.cli.run_control import find_meant_run
    from gpurun.core.untrusted import parse_object, safe_line, safe_text
    from gpurun.readers.weights import ask_trainer, find_checkpoint

    options = {
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "beams": beams,
    }
    for name, value in options.items():
        least, most, example = RANGES[name]
        if value is not None and not least <= value <= most:  # This also refuses NaN.
            option = f"--{name.replace('_', '-')}"
            what = f"{option} {value} is not between {least} and {most:,}."
            raise UsageError(f"usage.{name}", what, hint=f"Try {option} {example}.")
    sight = find_meant_run(session, run)
    found = find_checkpoint(sight, checkpoint)
    session.say(f"step {found.step:,}, on this computer")
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    settings += [] if stop is None else ["--stop=" + stop.replace(r"\n", "\n")]
    limit_s = START_S + TOKEN_S * (tokens or USUAL_TOKENS) * (beams or 1)
    answer = parse_object(ask_trainer("trainer.generate", found, *settings, f"--prompt={prompt}", limit_s=limit_s))
    if answer.get("unknown"):
        session.say(f"not in the vocabulary: {safe_line(', '.join(answer['unknown']))}")
    between = "\n" if "beams" in answer else ""
    shown = safe_text(f"{answer['prompt']}{between}{answer['text']}", most_lines=MOST_TOKENS)
    return Result(data={"run": sight.folder.name, **answer}, text="\n".join(shown))
