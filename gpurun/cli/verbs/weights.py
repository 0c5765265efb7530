"""`gpurun sample` and `gpurun export`: what to do with a checkpoint that came home."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.options import RunArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

Checkpoint = Annotated[str, typer.Option("--checkpoint", metavar="NAME", help="best, last, or a step: 000120.")]


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    sampling = ['gpurun sample fox-41 --prompt "def "', 'gpurun sample @last --prompt "the dog sleeps." --beams 4']
    verb(app, "sample", examples=sampling)(sample)
    verb(app, "export", examples=["gpurun export fox-41 ./fox-hf", "gpurun export @last --to hf ./model"])(export)


def sample(
    session: Session,
    run: RunArgument,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What the model continues, or translates.")],
    tokens: Annotated[int | None, typer.Option("--tokens", metavar="N", help="How many tokens to write.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token each time.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="K", help="Draw among so many; 0: all.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="S", help="The same seed, the same text.")] = None,
    beams: Annotated[
        int | None, typer.Option("--beams", metavar="N", help="Of a translation; 1 is greedy search.")
    ] = None,
    checkpoint: Checkpoint = "best",
) -> Result:
    """Let a run's checkpoint continue or translate a text, on this machine; what is not said is as in the recipe."""
    from gpurun.cli.sampling import sample_run

    wanted = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed, "beams": beams}
    return sample_run(session, run, prompt, checkpoint=checkpoint, **wanted)


def export(
    session: Session,
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder to make.")],
    to: Annotated[
        str, typer.Option("--to", metavar="FORM", help="hf: as Hugging Face's transformers reads it.")
    ] = "hf",
    checkpoint: Checkpoint = "best",
) -> Result:
    """Write a run's checkpoint in a form that other tools read, with a model card of the receipt's figures."""
    from gpurun.cli.exporting import export_run

    return export_run(session, run, folder, form=to, checkpoint=checkpoint)
