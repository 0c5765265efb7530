"""`gpurun recipes`: list, show, check and create recipes."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.help_panels import make_verb_group
from gpurun.cli.options import RecipeArgument, RecipeNames
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import ExitCode, GpurunError, UsageError

app = typer.Typer(help="List, show and check the recipes.", cls=make_verb_group("list"), rich_markup_mode=None)


@verb(app, "recipes list", examples=["gpurun recipes list"])
def list_all(session: Session) -> Result:
    """List the recipes."""
    from gpurun.jobs.training.recipe import list_recipes, load_recipe, parameters_of, resolve
    from gpurun.planning.transfer import vocabulary_of
    from gpurun.view.list_tables import RecipeRow, recipes_table

    rows = []
    for name in list_recipes():
        recipe = load_recipe(name)
        tables = recipe.tables
        rows.append(
            RecipeRow(
                name=name,
                parameters=parameters_of(tables.model, vocabulary_of(resolve(recipe, "full"))),
                tokens=tables.train.steps * tables.train.batch_tokens,
                gpu=tables.hardware.gpu,
                about=recipe.about,
            )
        )
    data = {"recipes": [asdict(row) for row in rows]}
    return Result(data=data, text=session.draw(recipes_table(rows, session.style)))


@verb(app, "recipes show", examples=["gpurun recipes show mini-gpt"])
def show(session: Session, recipe: RecipeArgument = "") -> Result:
    """Print a recipe's file."""
    from gpurun.core.paths import read_regular
    from gpurun.jobs.training.recipe import load_recipe

    loaded = load_recipe(recipe or session.settings["recipe"].value)
    text = read_regular(Path(loaded.path)).decode()
    return Result(data={"name": loaded.name, "tables": loaded.tables.as_record()}, text=text.rstrip())


@verb(app, "recipes check", examples=["gpurun recipes check", "gpurun recipes check mini-gpt my-recipe.toml"])
def check(session: Session, recipes: RecipeNames = []) -> Result:  # noqa: B006 - Typer copies defaults.
    """Plan recipes at catalogue prices and rehearse each one on this computer; all of them by default."""
    from gpurun.cli.recipe_checks import check_recipe, judge_recipe, own_home
    from gpurun.jobs.training.recipe import list_recipes
    from gpurun.view.check_table import CheckRow, checks_table

    rows: list[CheckRow] = []
    errors: list[GpurunError] = []
    for name in recipes or list_recipes():
        session.say(f"{name}: planning, then rehearsing on this computer")
        row = CheckRow(recipe=name)
        try:
            with own_home(session.home) as home:
                row = check_recipe(session, name, home)
            judge_recipe(row, name)
        except GpurunError as error:
            rows.append(replace(row, verdict=f"failed: {error.what}"))
            errors.append(error)
        else:
            rows.append(replace(row, ok=True))
        session.say(f"{name}: {rows[-1].verdict}")
    return Result(
        data={"recipes": [asdict(row) for row in rows]},
        text=session.draw(checks_table(rows, session.style)),
        errors=tuple(errors),
        exit_code=errors[0].exit_code if errors else ExitCode.DONE,
    )


@verb(app, "recipes new", examples=["gpurun recipes new my-recipe"])
def new(
    session: Session, name: Annotated[str, typer.Argument(metavar="NAME", help="The recipe's name; writes NAME.toml.")]
) -> Result:
    """Write a small recipe to start from into the working folder."""
    from gpurun.jobs.training.recipe import new_recipe

    stem = name.removesuffix(".toml")
    if not re.fullmatch(r"\w[\w-]*", stem):  # The name appears in TOML and in commands to copy.
        hint = "For example: gpurun recipes new my-recipe"
        raise UsageError("recipe.bad_name", f"{name!r} is not a plain name.", hint=hint)
    path = Path(f"{stem}.toml")
    try:
        with path.open("x", encoding="utf-8") as out:
            out.write(new_recipe(stem))
    except FileExistsError:
        raise UsageError("recipe.exists", f"{path} already exists.", hint="Choose another name.") from None
    after = f"Try it: gpurun train ./{path} --dry-run"
    return Result(data={"path": str(path.absolute())}, text=f"Wrote {path}.", after=after)
