"""`gpurun config show`."""

from __future__ import annotations

import typer

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb


def register(app: typer.Typer) -> None:
    """Add the verb and its own verbs."""
    config = typer.Typer(help="Defaults, and where each comes from.", no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(config, name="config")
    verb(config, "config show", examples=["gpurun config show", "GPURUN_MAX_COST=25 gpurun config show"])(show)
    verb(config, "config path", examples=["gpurun config path"])(path)


def show(session: Session) -> Result:
    """Show every setting with the place it comes from."""
    from gpurun.view.listings import config_table
    from gpurun.view.paint import render

    settings = session.settings
    rows = [(key, setting.value, setting.source) for key, setting in settings.items()]
    data = {key: {"value": s.value, "source": s.source} for key, s in settings.items()}
    return Result(
        data={"home": str(session.home.root), "settings": data},
        text=render(config_table(rows, session.style), session.style),
    )


def path(session: Session) -> Result:
    """Say which file holds your own defaults."""
    return Result(data={"path": str(session.home.config)}, text=str(session.home.config))
