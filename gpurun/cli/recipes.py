"""What the `recipes` verbs do."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import UsageError
from gpurun.lifecycle.quotes.unprepared import vocabulary_of
from gpurun.planning.recipe import list_recipes, load_recipe, new_recipe, parameters_of, resolve
from gpurun.view.listings import RecipeRow, recipes_table
from gpurun.view.paint import render


def list_recipes_result(session: Session) -> Result:
    """All bundled recipes with their size."""
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
    return Result(data=data, text=render(recipes_table(rows, session.style), session.style))


def show_recipe(session: Session, name: str) -> Result:
    """The recipe's own text, and its tables as data."""
    recipe = load_recipe(name or session.settings["recipe"].value)
    text = Path(recipe.path).read_text(encoding="utf-8")
    return Result(data={"name": recipe.name, "tables": recipe.tables.model_dump(mode="json")}, text=text.rstrip())


def new_recipe_file(session: Session, name: str) -> Result:
    """Write NAME.toml into the working folder; a file that is there is never replaced."""
    stem = name.removesuffix(".toml")
    if not re.fullmatch(r"\w[\w-]*", stem):  # It stands in TOML, and in commands to copy.
        raise UsageError("recipe.bad_name", f"{name!r} is not a plain name.", hint="Try: gpurun recipes new my-recipe")
    path = Path(f"{stem}.toml")
    try:
        with path.open("x", encoding="utf-8") as out:
            out.write(new_recipe(stem))
    except FileExistsError:
        raise UsageError("recipe.exists", f"{path} is here already.", hint="Choose another name.") from None
    after = f"Try it: gpurun train ./{path} --dry-run"
    return Result(data={"path": str(path.absolute())}, text=f"Wrote {path}.", after=after)
