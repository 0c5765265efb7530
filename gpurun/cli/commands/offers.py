"""`gpurun offers`: list GPUs for rent and their prices. Spends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.options import Providers, complete_gpu
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError

if TYPE_CHECKING:
    from gpurun.core.records import GpuNeed

ANY = "any"

app = typer.Typer(rich_markup_mode=None)


@verb(app, "offers", examples=["gpurun offers --gpu 8xA100", "gpurun offers --gpu 1xH100 --max-price 3"])
def offers(
    session: Session,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu", metavar="GPU", help="List this GPU, e.g. 8xA100; any: all GPUs.", autocompletion=complete_gpu
        ),
    ] = "",
    provider: Providers = [],  # noqa: B006 - Typer copies defaults.
    max_price: Annotated[
        str, typer.Option("--max-price", metavar="USD", help="List offers up to this price per hour.")
    ] = "",
    region: Annotated[str, typer.Option("--region", metavar="R", help="Use only this region.")] = "",
    spot: Annotated[bool, typer.Option("--spot", help="List spot machines: cheaper, but can be taken away.")] = False,
) -> Result:
    """List GPUs for rent, cheapest first: live prices from clouds with a key, else the packaged catalogue.

    For a cluster (`--provider slurm`), list its partitions with idle nodes and the longest job.

    Exit 5 (NoOffer) if nothing is for rent; exit 4 if no cloud could be asked.
    """
    from gpurun.cli.offer_listing import list_offers, nothing_found
    from gpurun.core.clock import utc
    from gpurun.core.money import parse_usd
    from gpurun.core.run_plan import Choices
    from gpurun.providers.catalog import demand_one_node, parse_gpu
    from gpurun.view.price_list import offers_screen

    if (cluster := _parse_cluster(provider)) is not None:
        return _list_partitions(session, cluster, parse_gpu(gpu) if gpu and gpu.strip().lower() != ANY else None)
    clouds = _require_clouds(provider)
    limit = parse_usd(max_price, name="--max-price") if max_price else None
    need = None if gpu.strip().lower() == ANY else parse_gpu(gpu or _usual_gpu(session))
    demand_one_node(need)
    found = list_offers(session, need, clouds, Choices(region=region or None, spot=spot))
    shown = [offer for offer in found.offers if limit is None or offer.rate_micros_per_hour <= limit]
    shown.sort(key=lambda offer: (offer.rate_micros_per_hour, offer.provider, offer.type_id, offer.region))
    data = {
        "gpu": str(need) if need else ANY,
        "live": found.read_wall is not None,
        "read_at": utc(found.read_wall) if found.read_wall is not None else None,
        "offers": [offer.model_dump(mode="json") for offer in shown],
        "silent": [{"provider": name, "why": why} for name, why in found.silent],
        "warnings": list(found.warnings),
    }
    warnings = [*(f"{name} did not answer: {why}" for name, why in found.silent), *found.warnings]
    text = session.draw(offers_screen(shown, found.notes, warnings, session.style))
    if not shown:
        error = nothing_found(found, need, clouds, limit)
        return Result(data=data, text=text, errors=(error,), exit_code=error.exit_code)
    after = (
        f"To see what a run would cost: gpurun plan --gpu {need}"
        if need
        else "For live prices: gpurun offers --gpu 8xA100"
    )
    return Result(data=data, text=text, after=after)


def _parse_cluster(providers: Sequence[str]) -> str | None:
    """Return the cluster in --provider; "" if it names the provider without a cluster; None if it is not a cluster."""
    from gpurun.core.places import place_facts

    name, _, cluster = providers[0].partition(":") if len(providers) == 1 else ("", "", "")
    return cluster if place_facts(name).is_queued else None


def _list_partitions(session: Session, name: str, need: GpuNeed | None) -> Result:
    """List the partitions of a cluster that have the requested GPU, as its controller shows them now."""
    from dataclasses import asdict
    from math import inf

    from gpurun.core.errors import NoOffer
    from gpurun.planning.cluster_look import partitions_of
    from gpurun.view.price_list import partitions_table

    cluster, found = partitions_of(name, session.home, session.clock)
    shown = [part for part in found if need is None or (part.is_up and need.nodes <= part.nodes_with(need.count))]
    rows = [asdict(part) | {"longest_s": None if part.longest_s == inf else part.longest_s} for part in shown]
    for row in rows:
        del row["over_s"], row["tracker"]
    data = {"cluster": cluster, "gpu": str(need) if need else ANY, "partitions": rows}
    if not shown:
        what = f"No partition of {cluster} has {need} on working nodes."
        error = NoOffer("slurm.too_few", what, hint=f"To list all partitions: gpurun offers --provider slurm:{cluster}")
        return Result(data=data, errors=(error,), exit_code=error.exit_code)
    after = f"To see when a job would start: gpurun plan --provider slurm:{cluster} --partition NAME"
    return Result(data=data, text=session.draw(partitions_table(shown, session.style)), after=after)


def _require_clouds(providers: Sequence[str]) -> list[str]:
    """Return the clouds to list; UsageError for a provider that is not a cloud."""
    from gpurun.providers.registry import CLOUDS, require_known

    require_known(providers)
    for name in providers:
        if name not in CLOUDS:
            what = f"{name} is a machine of your own, so it has no offers."
            raise UsageError("offers.not_a_cloud", what, hint=f"Use it: gpurun plan --provider {name}")
    return [name for name in CLOUDS if not providers or name in providers]


def _usual_gpu(session: Session) -> str:
    """Return the GPU of the default recipe."""
    from gpurun.jobs.training.recipe import load_recipe

    return load_recipe(session.settings["recipe"].value).tables.hardware.gpu
