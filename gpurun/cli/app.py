"""The command tree: one line a verb, in the order in which a person meets them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gpurun import __version__
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

app = typer.Typer(
    name="gpurun",
    help="Rent a GPU under a hard total-dollar cap, train, bring the checkpoints home, prove that the machine is gone.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for room in (auth, offers, train, watch, stop, proof, report, weights, confirm, aws, prepare, data, config, version):
    room.register(app)


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"gpurun {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Say which gpurun this is.", is_eager=True, callback=_tell_version)
    ] = False,
) -> None:
    """Rent a GPU under a hard total-dollar cap, train, bring the checkpoints home, prove that the machine is gone."""


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run_app(app))


if __name__ == "__main__":
    main()
