"""`gpurun config`: the settings, and where each comes from."""

from __future__ import annotations

import typer

from gpurun.cli.help_panels import make_verb_group
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(
    help="Show the settings and where each one comes from.", cls=make_verb_group("show"), rich_markup_mode=None
)


@verb(app, "config show", examples=["gpurun config show", "GPURUN_MAX_COST=25 gpurun config show"])
def show(session: Session) -> Result:
    """Show every setting and where it comes from."""
    from gpurun.view.list_tables import config_table

    settings = session.settings
    rows = [(key, setting.value, setting.source) for key, setting in settings.items()]
    data = {key: {"value": s.value, "source": s.source} for key, s in settings.items()}
    return Result(
        data={"home": str(session.home.root), "settings": data},
        text=session.draw(config_table(rows, session.style)),
    )


@verb(app, "config path", examples=["gpurun config path"])
def path(session: Session) -> Result:
    """Print the path of the file with your own defaults."""
    return Result(data={"path": str(session.home.config)}, text=str(session.home.config))
