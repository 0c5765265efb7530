"""Implements `gpurun data`: makes shards from a corpus before a machine is rented, and checks a folder of shards."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.help_panels import make_verb_group
from gpurun.cli.options import ACCEPT_SKIPPED, RecipeArgument, flag, make_text_option
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import Shared, verb
from gpurun.core.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from gpurun.core.run_plan import DataSummary
    from gpurun.data.layout import Layout as Layout
else:
    Layout = object

app = typer.Typer(help="Make shards from text, and check them.", cls=make_verb_group(), rich_markup_mode=None)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder of shards, with a data.json.")]


def _layout_from(session: Session, *, no_header: bool, text_column: str, val: str, **typed: Any) -> Layout:
    from gpurun.data.layout import AS_TEXT, parse_layout

    globs = {name: tuple(typed.pop(name)) for name in ("include", "exclude")}
    place = val if val in ("", AS_TEXT) else str(Path(val).expanduser().absolute())
    return parse_layout(**typed, **globs, column=text_column, has_head=not no_header, val=place)


def _glob_option(name: str, help_text: str) -> Any:
    return Annotated[list[str], typer.Option(name, metavar="GLOB", help=f"{help_text}; may be repeated.")]


LAYOUT = Shared(
    "layout",
    {
        "text_column": (
            make_text_option("--text-column", "NAME", "Read the text from this key or column (default text)."),
            "",
        ),
        "template": (make_text_option("--template", "TEXT", r"Join several columns: '{question}\n{answer}'."), ""),
        "delimiter": (
            make_text_option("--delimiter", "CHAR", "Split columns at ';' or tab; none: plain text."),
            "",
        ),
        "no_header": (flag("--no-header", "Read the first row as data; columns are 1, 2, …"), False),
        "per_line": (flag("--per-line", "Read each line of a text as a document."), False),
        "include": (_glob_option("--include", "Read only these files"), []),
        "exclude": (_glob_option("--exclude", "Skip these files"), []),
        "val": (make_text_option("--val", "PATH", "Hold out these files; none: a random share of all."), ""),
        "val_fraction": (
            Annotated[
                float | None,
                typer.Option("--val-fraction", metavar="F", help="Hold out this share (default: the recipe's)."),
            ],
            None,
        ),
    },
    _layout_from,
)
"""The flags that define how the files of a source are read."""


@verb(
    app,
    "data prepare",
    examples=[
        "gpurun data prepare gpt2-124m --out ./fineweb-edu",
        "gpurun data prepare gpt2-124m --source ./parquet --workers 4 --dedupe url,exact,near",
    ],
    shares=[LAYOUT],
)
def prepare(
    session: Session,
    layout: Layout,
    recipe: RecipeArgument = "",
    source: Annotated[
        str,
        typer.Option("--source", metavar="TEXT", help="Read a file, folder or hf:OWNER/NAME (default: the recipe's)."),
    ] = "",
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Write to this folder, or resume there.")] = "",
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", help="Use this many processes; 0: one per core.")
    ] = 0,
    executor: Annotated[
        str, typer.Option("--executor", metavar="WHO", help="Run on processes, datatrove or ray.")
    ] = "processes",
    dedupe: Annotated[
        str, typer.Option("--dedupe", metavar="KINDS", help="Drop duplicates: any of url,exact,near.")
    ] = "none",
    similarity: Annotated[
        float | None,
        typer.Option("--similarity", metavar="J", help="Drop near duplicates above this similarity (default 0.5)."),
    ] = None,
    shard_tokens: Annotated[
        int, typer.Option("--shard-tokens", metavar="N", help="Put about this many tokens into a shard.")
    ] = 100_000_000,
    accept_skipped: Annotated[bool, typer.Option("--accept-skipped", help=ACCEPT_SKIPPED)] = False,
) -> Result:
    """Make shards from a corpus of any size, on all cores. Repeat the command to resume after an interrupt."""
    from gpurun.data.dedupe.signatures import dedupe_of
    from gpurun.data.workers import require_known_executor

    require_known_executor(executor)
    if similarity is not None and "near" not in dedupe.split(","):
        raise _similarity_error(dedupe)
    # The header of a shard counts tokens in 32 bits, and a shard may exceed --shard-tokens by a row group.
    for name, value, least, most in (("workers", workers, 0, 10_000), ("shard-tokens", shard_tokens, 1000, 10**9)):
        if not least <= value <= most:
            what = f"--{name} {value} is too {'few' if value < least else 'many'}."
            raise UsageError(f"usage.{name.replace('-', '_')}", what, hint=f"Use a number from {least:,} to {most:,}.")
    choices: dict[str, Any] = {"layout": layout, "dedupe": dedupe_of(dedupe, similarity)}
    choices |= {"shard_tokens": shard_tokens, "accept_skipped": accept_skipped}
    choices |= {} if layout.val_fraction is None else {"val_fraction": layout.val_fraction}
    how = {"workers": workers or os.cpu_count() or 1, "executor": executor}
    return _prepare_or_continue(session, recipe, source=source, out=out, choices=choices, how=how)


def _prepare_or_continue(
    session: Session, recipe: str, *, source: str, out: str, choices: Mapping[str, Any], how: Mapping[str, Any]
) -> Result:
    """Prepare the shards, or continue an interrupted preparation, and return a result that describes them."""
    from gpurun.cli.progress_bar import ProgressBar
    from gpurun.data.prepare import prepare as prepare_text
    from gpurun.data.run_shards import order_for
    from gpurun.data.shard_folder import inspect_data
    from gpurun.jobs.training.recipe import load_recipe, resolve
    from gpurun.view.shard_lines import DataFigures, data_lines

    name = recipe or session.settings["recipe"].value
    resolved = resolve(load_recipe(name), "full")
    place = Path(out or f"{resolved.name}-data").expanduser().absolute()
    if resolved.tables.data.tokenizer.endswith("-pairs"):
        raise UsageError(
            "data.parallel",
            f"The recipe reads sentence pairs ({resolved.tables.data.tokenizer}), prepared when a run starts.",
            hint="Pass the pairs to the run: gpurun train RECIPE --data FILE.tsv",
        )
    bar = ProgressBar(session)
    try:
        order = order_for(resolved.record, source, place, **choices)
        made = prepare_text(order, bar.say, bar.show, **how)
        found, manifest = inspect_data(made.folder)
    except KeyboardInterrupt:
        bar.end()
        kept = "Interrupted. Finished shards are kept; repeat the command to resume."
        return Result(exit_code=ExitCode.INTERRUPTED, after=kept)
    finally:
        bar.end()
    figures = DataFigures(found, manifest["source"], skipped=made.passed_over)
    shown = session.draw(data_lines(place.name, figures, session.style))
    after = f"To train on it: gpurun train {shlex.quote(name)} --data {shlex.quote(out or place.name)}"
    data = {**found.model_dump(exclude={"beside"}), "made": made.made, "documents": manifest["source"]["documents"]}
    return Result(data=data, text=shown, after=after)


def _similarity_error(dedupe: str) -> UsageError:
    """Return the error for --similarity without near duplicates in --dedupe, where it would have no effect."""
    kinds = "near" if dedupe == "none" else f"{dedupe},near"
    what = f"--similarity applies only to near duplicates, but --dedupe is {dedupe}."
    return UsageError("usage.similarity", what, hint=f"Add --dedupe {kinds}, or leave --similarity out.")


@verb(
    app,
    "data adopt",
    examples=[
        "gpurun data adopt ./nanoGPT/data/openwebtext --tokenizer gpt2 --out ./openwebtext",
        "gpurun data adopt ./nanoGPT/data/shakespeare_char --tokenizer char --out ./shakespeare",
    ],
)
def adopt(
    session: Session,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Shards of nanoGPT, llm.c or build-nanogpt.")],
    out: Annotated[Path, typer.Option("--out", metavar="NEW", help="Create this folder with links to the shards.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="NAME", help="The tokeniser of the shards: gpt2 or char.")
    ],
    eot: Annotated[
        str, typer.Option("--eot", metavar="WHERE", help="Expect the end-of-text token before, after, or none.")
    ] = "",
) -> Result:
    """Describe another program's shards, so that runs can train on them; the shards are not moved."""
    from gpurun.data.adopt import ENDS, TOKENIZERS
    from gpurun.data.adopt import adopt as refer

    for name, value, known in (("tokenizer", tokenizer, TOKENIZERS), ("eot", eot or ENDS[0], ENDS)):
        if value not in known:
            what = f"--{name} {value} is not known."
            raise UsageError(f"usage.{name}", what, hint=f"Use one of: {', '.join(known)}.")
    place = out.expanduser().absolute()
    found, manifest = refer(folder.expanduser().absolute(), tokenizer, place, session.say, eot=eot)
    after = f"To train on it: gpurun train RECIPE --data {shlex.quote(str(out))}"
    return _folder_result(session, out.name, found, manifest, after=after)


@verb(app, "data hellaswag", examples=["gpurun data hellaswag hellaswag_val.jsonl ./fineweb-edu"])
def hellaswag(
    session: Session,
    questions: Annotated[Path, typer.Argument(metavar="FILE", help="The published hellaswag_val.jsonl.")],
    folder: Folder,
) -> Result:
    """Tokenise HellaSwag's questions into a folder of shards, for evaluations."""
    from gpurun.data.hellaswag import write_items

    path, count = write_items(questions.expanduser(), folder.expanduser(), session.say)
    after = f"To score on them at every evaluation: --data {folder} --set eval.hellaswag_items=1000"
    return Result(data={"items": count, "file": str(path)}, text=f"{count:,} questions in {path}", after=after)


@verb(app, "data inspect", examples=["gpurun data inspect ./fineweb-edu"])
def inspect(session: Session, folder: Folder) -> Result:
    """Check every token of a folder of shards, and show the folder's content."""
    from gpurun.data.shard_folder import inspect_data

    return _folder_result(session, folder.name, *inspect_data(folder.expanduser()))


def _folder_result(
    session: Session, name: str, found: DataSummary, manifest: Mapping[str, Any], *, after: str = ""
) -> Result:
    """Return the result that shows a folder of shards."""
    from gpurun.view.shard_lines import DataFigures, data_lines

    shards = {split: len(manifest[split]) for split in ("train", "val")}
    figures = DataFigures(found, manifest["source"], shards=shards, eot=str(manifest.get("eot", "unknown")))
    details = {"eot": figures.eot, "dtype": manifest.get("dtype"), "shards": shards, "about": manifest["source"]}
    shown = session.draw(data_lines(name, figures, session.style))
    return Result(data={**found.model_dump(exclude={"beside"}), **details}, text=shown, after=after)
