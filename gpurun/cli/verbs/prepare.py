"""`gpurun recipes`, `gpurun pack` and `gpurun doctor`: what is there before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.options import Providers, RecipeArgument, RecipeNames
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    recipes = typer.Typer(help="What can be trained.", no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(recipes, name="recipes")
    verb(recipes, "recipes list", examples=["gpurun recipes list"])(list_all)
    verb(recipes, "recipes show", examples=["gpurun recipes show mini-gpt"])(show)
    verb(recipes, "recipes check", examples=["gpurun recipes check", "gpurun recipes check mini-gpt my-recipe.toml"])(
        check
    )
    verb(recipes, "recipes new", examples=["gpurun recipes new my-recipe"])(new)
    verb(app, "pack", examples=["gpurun pack ./shards --dry-run", "gpurun pack ./shards -o shards.tar.zst"])(pack)
    verb(app, "doctor", examples=["gpurun doctor", "gpurun doctor --online --provider runpod"])(doctor)


def list_all(session: Session) -> Result:
    """List the recipes."""
    from gpurun.cli.recipes import list_recipes_result

    return list_recipes_result(session)


def show(session: Session, recipe: RecipeArgument = "") -> Result:
    """Print a recipe's file."""
    from gpurun.cli.recipes import show_recipe

    return show_recipe(session, recipe)


def check(session: Session, recipes: RecipeNames = []) -> Result:  # noqa: B006 - Typer copies defaults.
    """Plan recipes at the catalogue's prices and rehearse each on this machine, end to end; all of them by default."""
    from gpurun.cli.recipe_checks import check_recipes

    return check_recipes(session, recipes)


def new(
    session: Session, name: Annotated[str, typer.Argument(metavar="NAME", help="Writes NAME.toml here.")]
) -> Result:
    """Write a small recipe to start from into the working folder."""
    from gpurun.cli.recipes import new_recipe_file

    return new_recipe_file(session, name)


def pack(
    session: Session,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What would be shipped.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Write the pack there.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list, with sizes and refusals.")] = False,
) -> Result:
    """Show exactly what would be shipped, or write it to a file."""
    from gpurun.cli.packing import pack_folder

    return pack_folder(session, folder, output=output, dry_run=dry_run)


def doctor(
    session: Session,
    provider: Providers = [],  # noqa: B006 - Typer copies defaults.
    online: Annotated[bool, typer.Option("--online", help="Ask the clouds too; it changes nothing there.")] = False,
) -> Result:
    """Check this machine, its keys, and with --online what the clouds say of them and of what was left there."""
    from gpurun.cli.checkup import check_machine

    return check_machine(session, provider, online=online)
