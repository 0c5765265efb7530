"""`gpurun data`: a corpus made into shards before anything is rented, and what a folder of shards holds."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.options import RecipeArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import ExitCode, UsageError

app = typer.Typer(help="Make shards from text, and check them.", no_args_is_help=True, rich_markup_mode=None)


@verb(
    app,
    "data prepare",
    examples=[
        "gpurun data prepare gpt2-124m --out ./fineweb-edu",
        "gpurun data prepare gpt2-124m --source ./parquet --workers 4 --dedupe url,exact,near",
    ],
)
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
    options: dict[str, int | float | str] = {"workers": workers, "shard-tokens": shard_tokens}
    options |= {"text-column": text_column, "executor": executor, "dedupe": dedupe}
    if val_fraction is not None:
        options["val-fraction"] = val_fraction
    if similarity is not None:
        _demand_near(dedupe)
        options["similarity"] = similarity
    return _prepared(session, recipe, source=source, out=out, options=options)


def _prepared(
    session: Session, recipe: str, *, source: str, out: str, options: Mapping[str, int | float | str]
) -> Result:
    """Make the folder of shards, or go on with it, and say what it holds."""
    from gpurun.cli.progress_bar import ProgressBar
    from gpurun.core.installed_files import bundle_root
    from gpurun.data.corpora import prepare_data
    from gpurun.planning.recipe import load_recipe, resolve
    from gpurun.view.shard_lines import DataFigures, data_lines

    name = recipe or session.settings["recipe"].value
    loaded = load_recipe(name)
    resolved, wanted = resolve(loaded, "full"), loaded.tables.data
    place = Path(out or f"{resolved.name}-data").expanduser().absolute()
    if "val_fraction" in loaded.written["data"]:
        options = {"val-fraction": wanted.val_fraction, **options}
    flags = [f"--{key}={value}" for key, value in options.items()]
    bar = ProgressBar(session)
    if wanted.limit_mb:
        bar.say(f"data.limit_mb {wanted.limit_mb} of {resolved.name} is for text that a run tokenises: all is prepared")
    try:
        answer = prepare_data(
            resolved.record,
            source=source,
            out=place,
            options=flags,
            root=bundle_root(),
            say=bar.say,
            progress=bar.show,
        )
    except KeyboardInterrupt:
        bar.end()
        kept = "Interrupted. What is finished stays: the same command goes on with it."
        return Result(exit_code=ExitCode.INTERRUPTED, after=kept)
    finally:
        bar.end()
    found = answer["data"]
    figures = DataFigures(
        **{key: found[key] for key in ("tokenizer", "tokenizer_sha256", "vocab_size", "train_tokens", "val_tokens")},
        shard_bytes=found["bytes"],
        source=answer["source"],
        skipped=answer["skipped"],
    )
    text = session.draw(data_lines(place.name, figures, session.style))
    after = f"Train on it: gpurun train {shlex.quote(name)} --data {shlex.quote(out or place.name)}"
    data = {**found, "made": answer["made"], "documents": answer["source"]["documents"]}
    return Result(data=data, text=text, after=after)


def _demand_near(dedupe: str) -> None:
    """Refuse a similarity where no near duplicates are looked for: one would take it for a request to drop them."""
    if "near" not in dedupe.split(","):
        kinds = "near" if dedupe == "none" else f"{dedupe},near"
        raise UsageError("usage.similarity", f"--similarity is of near duplicates, and --dedupe is {dedupe}.",
                         hint=f"Add --dedupe {kinds}, or leave --similarity out.")  # fmt: skip


@verb(app, "data hellaswag", examples=["gpurun data hellaswag hellaswag_val.jsonl ./fineweb-edu"])
def hellaswag(
    session: Session,
    questions: Annotated[Path, typer.Argument(metavar="FILE", help="hellaswag_val.jsonl, as it is published.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of shards.")],
) -> Result:
    """Tokenise HellaSwag's questions beside the shards, so that evaluations can ask them."""
    from gpurun.core.installed_files import bundle_root
    from gpurun.data.corpora import add_hellaswag

    made = add_hellaswag(questions, folder, root=bundle_root(), say=session.say)
    after = f"Ask some at every evaluation: --data {folder} --set eval.hellaswag_items=1000"
    return Result(data=made, text=f"{made['items']:,} questions in {made['file']}", after=after)


@verb(app, "data inspect", examples=["gpurun data inspect ./fineweb-edu"])
def inspect(
    session: Session, folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with a data.json.")]
) -> Result:
    """Check every shard of a folder to the last token, and say what it holds."""
    from gpurun.data.corpora import inspect_data
    from gpurun.view.shard_lines import DataFigures, data_lines

    found, manifest = inspect_data(folder.expanduser())
    shards = {split: len(manifest[split]) for split in ("train", "val")}
    figures = DataFigures(
        tokenizer=found.tokenizer,
        tokenizer_sha256=found.tokenizer_sha256,
        vocab_size=found.vocab_size,
        train_tokens=found.train_tokens,
        val_tokens=found.val_tokens,
        shard_bytes=found.bytes,
        source=manifest["source"],
        shards=shards,
        eot=str(manifest.get("eot", "unknown")),
    )
    told = {"eot": figures.eot, "dtype": manifest.get("dtype"), "shards": shards, "about": manifest["source"]}
    text = session.draw(data_lines(folder.name, figures, session.style))
    return Result(data={**found.model_dump(exclude={"beside"}), **told}, text=text)
