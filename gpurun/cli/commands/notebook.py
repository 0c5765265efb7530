"""Implements `gpurun notebook`: writes a self-contained notebook for a platform that gpurun cannot control."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.options import RecipeArgument, Set, challenge_override
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError

app = typer.Typer(rich_markup_mode=None)
MOST_MINUTES = 12 * 60


@verb(
    app,
    "notebook",
    examples=["gpurun notebook course-lab --for colab --data text.txt", "gpurun notebook mini-gpt --for kaggle"],
)
def notebook(
    session: Session,
    recipe: RecipeArgument,
    *,
    platform: Annotated[str, typer.Option("--for", metavar="PLATFORM", help="Write for colab, kaggle or jupyter.")],
    data: Annotated[str, typer.Option("--data", metavar="PATH", help="Include text or shards, a few megabytes.")] = "",
    overrides: Set = [],  # noqa: B006 - Typer copies it.
    challenge: Annotated[
        str, typer.Option("--challenge", metavar="C", help="Derive the seed from this challenge.")
    ] = "",
    minutes: Annotated[
        int,
        typer.Option(
            "--minutes", metavar="MIN", min=1, max=MOST_MINUTES, help="Stop training after this many minutes."
        ),
    ] = 60,
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="Add Colab's badge, for a notebook at this URL.")
    ] = "",
    output: Annotated[str, typer.Option("-o", metavar="FILE", help="Write to this file (default RECIPE.ipynb).")] = "",
) -> Result:
    """Write a notebook that trains a recipe on Colab, Kaggle or Jupyter and saves evidence to import."""
    from gpurun.cli.commands.plan import run_name
    from gpurun.cli.render import write_bytes
    from gpurun.core.run_plan import Request
    from gpurun.data.run_shards import prepare_run_shards
    from gpurun.jobs.training.recipe import load_recipe, resolve
    from gpurun.planning.transfer import public_shards
    from gpurun.readers.notebook_file import PLATFORMS, badge_to, notebook_facts, notebook_of
    from gpurun.view.number_format import format_bytes

    if platform not in PLATFORMS:
        what = f"--for {platform!r} is not a supported platform."
        raise UsageError("notebook.platform", what, hint=f"Use one of: {', '.join(PLATFORMS)}.")
    if url and platform != "colab":
        what = f"--url adds the badge of Colab, but this notebook is for {platform}."
        raise UsageError("notebook.badge", what, hint="Add --for colab, or leave --url out.")
    badge = badge_to(url) if url else ""
    given = (*overrides, *challenge_override(session, challenge))
    resolved = resolve(load_recipe(recipe), "full", given, processes=1)
    if resolved.tables.train.init_from:
        what = "train.init_from names weights, but a notebook cannot include them."
        raise UsageError("notebook.weights", what, hint='Start from random weights: --set train.init_from=""')
    if public := public_shards(Request(recipe=recipe, data=data or None), resolved.tables.data.source):
        what = f"{public} would be downloaded during training, but a notebook trains without a network."
        raise UsageError("notebook.public", what, hint="Use a text of a few megabytes: --data PATH")
    with run_name(session, "") as run:
        into, say = session.home.staged_data(run), session.talk_when_slow()
        shards = prepare_run_shards(resolved.record, data or None, into=into, cache=session.home.shards, say=say)
        content = notebook_of(resolved, shards, notebook_facts(resolved, shards, given, platform), minutes, badge=badge)
    path = Path(output or f"{resolved.name}.ipynb").expanduser()
    write_bytes(path, content, flag="-o")
    fields = {"file": str(path), "bytes": len(content), "recipe": resolved.name, "recipe_sha256": resolved.sha256}
    text = f"Wrote {path}, {format_bytes(len(content))}. Open it there, choose a GPU, run all cells, end the session."
    return Result(
        data=fields, text=text, after="Then import the file that you download there: gpurun import evidence.zip"
    )
