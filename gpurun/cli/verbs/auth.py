"""`gpurun auth`: keys of the clouds, read from a prompt or standard input and never from an argument."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb


def _complete_key(incomplete: str) -> list[str]:
    from gpurun.core.credentials import KEYS

    return [name for name in KEYS if name.startswith(incomplete)]


Owner = Annotated[
    str, typer.Argument(metavar="PROVIDER", help="runpod, lambda or lambda-guard.", autocompletion=_complete_key)
]
# Taken only to be refused: Typer would print an argument that it does not expect, and so the key.
Stray = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="no key here")]


def register(app: typer.Typer) -> None:
    """Add the verb and its own verbs."""
    auth = typer.Typer(help="Keys of the clouds: keep, show where from, remove.", no_args_is_help=True,
                       rich_markup_mode=None)  # fmt: skip
    app.add_typer(auth, name="auth")
    keeping = ["gpurun auth set runpod", "pass show runpod | gpurun auth set runpod --online"]
    verb(auth, "auth set", examples=keeping)(set_key)
    verb(auth, "auth status", examples=["gpurun auth status", "gpurun auth status --json"])(status)
    verb(auth, "auth rm", examples=["gpurun auth rm runpod"])(rm)


def set_key(
    session: Session,
    provider: Owner,
    stray: Stray = None,
    online: Annotated[bool, typer.Option("--online", help="Then ask the provider whether it works.")] = False,
) -> Result:
    """Keep a provider's key, read from a prompt without echo or from standard input."""
    from gpurun.cli.auth import keep_key

    return keep_key(session, provider, stray or [], online=online)


def status(session: Session) -> Result:
    """Show which providers have a key and where it is from; never any part of a key."""
    from gpurun.cli.auth import key_status

    return key_status(session)


def rm(session: Session, provider: Owner) -> Result:
    """Remove a key that was kept with `auth set`."""
    from gpurun.cli.auth import remove_key

    return remove_key(session, provider)
