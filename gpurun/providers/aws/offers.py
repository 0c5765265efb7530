"""Finds EC2's offers for a need: which regions have the machine types, and their current prices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from gpurun.core.errors import SetupError
from gpurun.core.money import Micros, usd
from gpurun.core.records import GpuNeed, Offer
from gpurun.providers.aws.image import WITHOUT_DRIVER
from gpurun.providers.aws.launch import zones_selling
from gpurun.providers.aws.wire import AwsClients, AwsRefused, AwsReply
from gpurun.providers.base import Rejected, Unknown

PRICING_REGION = "us-east-1"
"""The Pricing API exists in few regions, but reports the prices of all regions."""
_HOUR = "Hrs"
_FIELDS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}


def offers_for_need(wire: AwsClients, need: GpuNeed, known: Sequence[Offer], *, spot: bool) -> list[Offer]:
    """Return the known rows with the needed number of GPUs, at current prices.

    The region is the chosen one or, if none was chosen, each row's own.
    """
    rows = [row for row in known if row.gpu_count == need.count and not row.type_id.startswith(WITHOUT_DRIVER)]
    by_region: dict[str, list[Offer]] = {}
    for row in rows:
        by_region.setdefault(wire.chosen_region or row.region, []).append(row)
    found = []
    for region, here in by_region.items():
        zones = zones_selling(wire, region, [row.type_id for row in here])
        sold = [row for row in here if zones[row.type_id]]
        found += list(_price_on_spot(wire, region, sold) if spot else _price_on_demand(wire, region, sold))
    return found


def _price_on_demand(wire: AwsClients, region: str, rows: Sequence[Offer]) -> Iterator[Offer]:
    """Yield the rows at the Pricing API's price; if it is not readable, at the catalogue's price for that region."""
    for row in rows:
        try:
            price = _read_listed_price(wire, region, row.type_id)
        except (AwsRefused, Unknown, Rejected, SetupError) as error:
            if row.region != region:
                raise Unknown(f"the price of {row.type_id} in {region} cannot be read: {error}") from error
            dated = row.price_source.partition(" (")[0]
            yield row.model_copy(update={"price_source": f"{dated} (Pricing API: {_short_reason(error)})"})
            continue
        if price is not None:
            yield row.model_copy(
                update={"region": region, "rate_micros_per_hour": price, "price_source": "Pricing API"}
            )


def _price_on_spot(wire: AwsClients, region: str, rows: Sequence[Offer]) -> Iterator[Offer]:
    """Yield the rows at the newest spot price of the cheapest zone. That price becomes the maximum bid."""
    if not rows:
        return
    lowest: dict[str, Micros] = {}
    for entry in wire.pages(
        "ec2",
        region,
        "describe_spot_price_history",
        "SpotPriceHistory",
        InstanceTypes=[row.type_id for row in rows],
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.fromtimestamp(wire.clock.wall(), UTC),
    ):
        price = parse_dollars(entry.get("SpotPrice"))
        kind = str(entry.get("InstanceType"))
        if price is not None and (kind not in lowest or price < lowest[kind]):
            lowest[kind] = price
    for row in rows:
        if row.type_id in lowest:
            yield row.model_copy(
                update={
                    "region": region,
                    "rate_micros_per_hour": lowest[row.type_id],
                    "price_source": "spot price history",
                    "spot": True,
                    "on_demand_micros_per_hour": _read_on_demand_price(wire, region, row),
                }
            )


def _read_on_demand_price(wire: AwsClients, region: str, row: Offer) -> Micros | None:
    """Return the on-demand price of a machine type; None if it cannot be read: a spot offer does not need it."""
    try:
        return next((offer.rate_micros_per_hour for offer in _price_on_demand(wire, region, [row])), None)
    except Unknown:
        return None


def _read_listed_price(wire: AwsClients, region: str, type_id: str) -> Micros | None:
    """Return the highest listed on-demand price; None if there is none, Unknown if the list is not readable."""
    fields = {**_FIELDS, "instanceType": type_id, "regionCode": region}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in fields.items()]
    query: dict[str, Any] = {"ServiceCode": "AmazonEC2", "FormatVersion": "aws_v1", "Filters": filters}
    products = list(wire.pages("pricing", PRICING_REGION, "get_products", "PriceList", **query))
    prices: list[Micros] = []
    for text in products:
        try:
            prices.extend(_parse_prices_in(json.loads(text)))
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            raise Unknown("its answer cannot be read") from error
    return max(prices, default=None)


def _parse_prices_in(product: AwsReply) -> Iterator[Micros]:
    """Yield every hourly on-demand price of one product; none for a capacity block, which is not sold on demand."""
    if product["product"]["attributes"].get("marketoption", "OnDemand") != "OnDemand":
        return
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price = parse_dollars(dimension["pricePerUnit"].get("USD"))
            if dimension.get("unit", _HOUR) == _HOUR and price is not None:
                yield price


def parse_dollars(text: object) -> Micros | None:
    """Return the price in a string of AWS's; None if it is zero, or not a price."""
    try:
        amount = Decimal(str(text))
    except InvalidOperation:
        return None
    return usd(amount) if amount.is_finite() and 0 < amount < 1_000_000 else None


def _short_reason(error: Exception) -> str:
    return error.code if isinstance(error, AwsRefused | SetupError) else "no clear answer"
