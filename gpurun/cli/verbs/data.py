"""`gpurun data`: a corpus made into shards before anything is rented, and what a folder of shards holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.options import RecipeArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    data = typer.Typer(help="Text made into shards, and looked at.", no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(data, name="data")
    preparing = [
        "gpurun data prepare gpt2-124m --out ./fineweb-edu",
        "gpurun data prepare gpt2-124m --source ./parquet --workers 4 --dedupe url,exact,near",
    ]
    verb(data, "data prepare", examples=preparing)(prepare)
    asking = ["gpurun data hellaswag hellaswag_val.jsonl ./fineweb-edu"]
    verb(data, "data hellaswag", examples=asking)(hellaswag)
    verb(data, "data inspect", examples=["gpurun data inspect ./fineweb-edu"])(inspect)


def prepare(
    session: Session,
    recipe: RecipeArgument = "",
    source: Annotated[
        str, typer.Option("--source", metavar="TEXT", help="A file, a folder, or hf:OWNER/NAME; else the recipe's.")
    ] = "",
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="The folder to make, or to go on with.")] = "",
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Processes; 0: one a core.")] = 0,
    executor: Annotated[
        str, typer.Option("--executor", metavar="WHO", help="processes, or datatrove, or ray.")
    ] = "processes",
    val_fraction: Annotated[
        float | None, typer.Option("--val-fraction", metavar="F", help="Held out; else the recipe's, or 0.005.")
    ] = None,
    text_column: Annotated[
        str, typer.Option("--text-column", metavar="NAME", help="Where Parquet and JSON Lines have the text.")
    ] = "text",
    dedupe: Annotated[
        str, typer.Option("--dedupe", metavar="KINDS", help="Drop duplicates: url,exact,near, or some of them.")
    ] = "none",
    similarity: Annotated[
        float | None, typer.Option("--similarity", metavar="J", help="Of near duplicates, of runs of five words; 0.5.")
    ] = None,
    shard_tokens: Annotated[
        int, typer.Option("--shard-tokens", metavar="N", help="A shard's at most, about.")
    ] = 100_000_000,
) -> Result:
    """Make shards of a corpus of any size, on all cores; ended at any moment, the same command goes on."""
    from gpurun.cli.data import prepare_folder

    options: dict[str, int | float | str] = {"workers": workers, "shard-tokens": shard_tokens}
    options |= {"text-column": text_column, "executor": executor, "dedupe": dedupe}
    if val_fraction is not None:
        options["val-fraction"] = val_fraction
    if similarity is not None:
        _demand_near(dedupe)
        options["similarity"] = similarity
    return prepare_folder(session, recipe, source=source, out=out, options=options)


def _demand_near(dedupe: str) -> None:
    """Refuse a similarity where no near duplicates are looked for: it would be taken for a wish to drop them."""
    from gpurun.core.errors import UsageError

    if "near" not in dedupe.split(","):
        kinds = "near" if dedupe == "none" else f"{dedupe},near"
        raise UsageError("usage.similarity", f"--similarity is of near duplicates, and --dedupe is {dedupe}.",
                         hint=f"Add --dedupe {kinds}, or leave --similarity out.")  # fmt: skip


def hellaswag(
    session: Session,
    questions: Annotated[Path, typer.Argument(metavar="FILE", help="hellaswag_val.jsonl, as it is published.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of shards.")],
) -> Result:
    """Tokenise HellaSwag's questions beside the shards, so that evaluations can ask them."""
    from gpurun.cli.data import hellaswag_folder

    return hellaswag_folder(session, questions, folder)


def inspect(
    session: Session, folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with a data.json.")]
) -> Result:
    """Check every shard of a folder to the last token, and say what it holds."""
    from gpurun.cli.data import inspect_folder

    return inspect_folder(session, folder)
