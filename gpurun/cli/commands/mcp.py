"""`gpurun mcp`: serve an agent's tools within a mandate."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.paths import MANDATE_VARIABLE

app = typer.Typer(rich_markup_mode=None)


@verb(app, "mcp", examples=["gpurun mcp --mandate ~/.local/share/gpurun/mandates/1f3a9c0d.json"])
def mcp(
    session: Session,
    mandate: Annotated[
        str, typer.Option("--mandate", metavar="FILE", help="Use this mandate; it limits what the agent may spend.")
    ] = "",
) -> Result:
    """Serve an agent over standard input and output, within a mandate."""
    if session.bounds and mandate and Path(mandate).stem != session.bounds.mandate.id:
        what = f"This process already has the mandate {session.bounds.mandate.id}, but --mandate names another."
        raise UsageError("mandate.other", what, hint="Leave --mandate out.")
    if mandate:
        os.environ[MANDATE_VARIABLE] = str(Path(mandate).expanduser().absolute())
    os.environ["GPURUN_HOME"] = str(session.home.root)  # The processes of the tools read it.
    served = replace(session, json=True, quiet=True, no_input=True)
    if served.bounds is None:
        raise UsageError("mandate.missing", "gpurun mcp needs a mandate.", hint="Name one: --mandate FILE")
    served.bounds.require_valid()
    try:
        from gpurun.cli.mcp_server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("anyio", "mcp", "mcp_types"):
            raise
        from gpurun.core.installed_files import install_line

        what = "gpurun mcp needs the package mcp, which is not installed."
        raise SetupError("mcp.missing", what, hint=install_line("mcp")) from None
    from gpurun.cli.agent_tools import AgentDesk

    serve(AgentDesk(served, served.bounds))
    return Result()
