"""The flags that more than one verb takes, each written once, and the Request that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.session import Session

if TYPE_CHECKING:
    from gpurun.core.model import Request


def _complete_run(incomplete: str) -> list[str]:
    from gpurun.core.paths import Home, default_home

    return [name for name in Home(default_home()).run_names() if name.startswith(incomplete)]


def _complete_recipe(incomplete: str) -> list[str]:
    from gpurun.planning.recipe import list_recipes

    return [name for name in list_recipes() if name.startswith(incomplete)]


def _complete_provider(incomplete: str) -> list[str]:
    from gpurun.providers.registry import PROVIDERS

    return [name for name in PROVIDERS if name.startswith(incomplete)]


RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Name, unique beginning, or @last.", autocompletion=_complete_run)
]
RecipeArgument = Annotated[
    str, typer.Argument(metavar="[RECIPE]", help="A recipe's name or file.", autocompletion=_complete_recipe)
]
Gpu = Annotated[str, typer.Option("--gpu", metavar="GPU", help="For instance 8xA100, 1xH100 or 8xA100-80GB.")]
MaxCost = Annotated[str, typer.Option("--max-cost", metavar="USD", help="What the whole run may cost at most.")]
Providers = Annotated[
    list[str],
    typer.Option("--provider", metavar="P", help="Only this one; may be repeated.", autocompletion=_complete_provider),
]  # fmt: skip
Region = Annotated[str, typer.Option("--region", metavar="R", help="Only this region.")]
Data = Annotated[str, typer.Option("--data", metavar="PATH", help="Prepared shards, or a text file or folder.")]
Hours = Annotated[float, typer.Option("--hours", metavar="H", help="Train at most this long.")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe's key; may be repeated.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Rehearse on this machine's CPU, free.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def request_from(
    session: Session,
    *,
    recipe: str,
    gpu: str,
    max_cost: str,
    provider: list[str],
    region: str,
    data: str,
    hours: float,
    overrides: list[str],
    dry_run: bool = False,
) -> Request:
    """What was typed, with the settings' defaults filled in, checked one by one."""
    from gpurun.core.errors import UsageError
    from gpurun.core.model import Request
    from gpurun.core.money import parse_usd
    from gpurun.planning.catalog import parse_gpu

    settings = session.settings
    cap = max_cost or settings["max_cost"].value
    if hours < 0:
        raise UsageError(
            "usage.hours", f"--hours {hours} is below zero.", hint="Give the hours to train at most: --hours 2."
        )
    named = provider or [name for name in settings["providers"].value.split(",") if name]
    return Request(
        recipe=recipe or settings["recipe"].value,
        overrides=tuple(overrides),
        gpu=parse_gpu(gpu) if gpu else None,
        max_cost_micros=parse_usd(cap) if cap else None,
        providers=tuple(named),
        region=region or None,
        data=data or None,
        hours=hours or None,
        dry_run=dry_run,
    )
