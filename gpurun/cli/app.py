"""The command tree: one line a verb, in the order in which a person meets them."""

from __future__ import annotations

import gc
import io
import os
import sys
from typing import Annotated

import typer

from gpurun import __version__
from gpurun.cli.output import put
from gpurun.cli.verb import run_app
from gpurun.cli.verbs import (
    auth,
    aws,
    config,
    confirm,
    data,
    offers,
    prepare,
    proof,
    report,
    stop,
    train,
    version,
    watch,
    weights,
)

_ROOMS = {
    auth: ("auth",),
    offers: ("offers",),
    train: ("plan", "train"),
    watch: ("ps", "attach", "logs"),
    stop: ("stop", "resume", "collect", "destroy"),
    proof: ("receipt", "audit", "reap"),
    report: ("report",),
    weights: ("sample", "export"),
    confirm: ("confirm-shutdown",),
    aws: ("aws",),
    prepare: ("recipes", "pack", "doctor"),
    data: ("data",),
    config: ("config",),
    version: ("version",),
}
"""Each room of verbs and their first words."""


def build_app(first_word: str = "") -> typer.Typer:
    """The whole command line, or only the room of a first word: a plan need not wait for the flags of forty verbs."""
    app = typer.Typer(
        name="gpurun",
        help=common.__doc__,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        pretty_exceptions_show_locals=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(common)
    for room in [room for room, words in _ROOMS.items() if first_word in words] or _ROOMS:
        room.register(app)
    return app


def _tell_version(wanted: bool) -> None:
    if wanted:
        put(f"gpurun {__version__}")
        raise typer.Exit


def common(
    version: Annotated[
        bool, typer.Option("--version", help="Say which gpurun this is.", is_eager=True, callback=_tell_version)
    ] = False,
) -> None:
    """Rent a GPU under a hard total-dollar cap, train, bring the checkpoints home, prove that the machine is gone."""


def main() -> None:
    """Run the command line and exit with its code."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # Looking for them takes longer than judging offers.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # A terminal that is not UTF-8, or half a character in a file's name.
    code = run_app(build_app(*sys.argv[1:2]))
    gc.freeze()  # The interpreter's end would look twice through all that was made: a tenth of a short command's time.
    sys.exit(code)


if __name__ == "__main__":
    main()
