"""`gpurun offers`: what can be rented now, and for how much. It spends nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.options import Providers
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "offers", examples=["gpurun offers --gpu 8xA100", "gpurun offers --gpu 1xH100 --max-price 3"])(offers)


def offers(
    session: Session,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="GPU", help="For instance 8xA100; any lists the catalogue.")
    ] = "",
    provider: Providers = [],  # noqa: B006 - Typer copies defaults.
    max_price: Annotated[str, typer.Option("--max-price", metavar="USD", help="At most so many dollars an hour.")] = "",
    region: Annotated[str, typer.Option("--region", metavar="R", help="Only this region.")] = "",
    spot: Annotated[bool, typer.Option("--spot", help="What may be taken away, at its lower price.")] = False,
) -> Result:
    """List what can be rented now, cheapest first: live where there is a key, else from the packaged catalogue."""
    from gpurun.cli.offers import list_offers

    return list_offers(session, gpu, provider, max_price=max_price, region=region, spot=spot)
