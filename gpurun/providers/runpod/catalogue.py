"""Reads current prices and availability for the known rows, in both of RunPod's clouds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.money import Micros, times
from gpurun.core.records import GpuNeed, Offer
from gpurun.providers._http import Http
from gpurun.providers.base import Unknown
from gpurun.providers.runpod.parse import explain_runpod_answer, rate
from gpurun.providers.runpod.pods import IMAGE_CUDA, flavour_of

CLOUDS = ("secure", "community")
_AVAILABLE = {"include": "AVAILABILITY", "product": "POD"}


def gpu_offers(http: Http, need: GpuNeed, known: Sequence[Offer], now_wall: float, region: str | None) -> list[Offer]:
    """Return an offer for each known GPU and each cloud that has the needed number (in the region, if given)."""
    found = []
    for cloud in CLOUDS if known else ():
        query = {**_AVAILABLE, "count": str(need.count), "cloud": cloud.upper(), "minCudaVersion": IMAGE_CUDA}
        for kind in _list_available_entries(http, "gpus", query, region):
            row = _choose_best_row(known, str(kind.get("id")), need.count, cloud)
            price = _parse_price(kind, cloud, need.count)
            if row is not None and price is not None:
                found.append(_build_offer(row, need.count, times(price, need.count), cloud, now_wall))
    return found


def cpu_offers(http: Http, known: Sequence[Offer], now_wall: float, region: str | None) -> list[Offer]:
    """Return an offer for each known CPU pod that is available. Only the secure cloud has CPU pods."""
    found = []
    for row in {offer.type_id: offer for offer in known}.values():
        flavour, vcpus = flavour_of(row.type_id)
        for kind in _list_available_entries(http, "cpus", {**_AVAILABLE, "vcpuCount": str(vcpus)}, region):
            price = rate(_parse_part(kind, "price").get("securePerVcpu"))
            if (
                kind.get("id") == flavour
                and price is not None
                and _parse_number(_parse_part(kind, "vcpu").get("max")) >= vcpus
            ):
                found.append(_build_offer(row, 0, times(price, vcpus), "secure", now_wall))
    return found


def data_centers(http: Http) -> tuple[str, ...]:
    """Return the ids of all data centres."""
    listed = _list_entries(http, "datacenters", "dataCenters", {})
    return tuple(str(center["id"]) for center in listed if isinstance(center.get("id"), str))


def _list_available_entries(
    http: Http, what: str, query: Mapping[str, str], region: str | None
) -> Iterator[Mapping[str, Any]]:
    """Yield the entries that are available in the region; if no region is given, those that are available anywhere.

    An entry with unknown availability counts as available.
    """
    for entry in _list_entries(http, what, what, query):
        places = entry.get("dataCenters")
        if region is not None and isinstance(places, list):
            levels = [place.get("availability") for place in places if _is_in_region(place, region)]
        else:
            levels = [entry.get("availability")]
        if any(level != "NONE" for level in levels):
            yield entry


def _is_in_region(place: object, region: str) -> bool:
    return isinstance(place, dict) and place.get("id") == region


def _list_entries(http: Http, what: str, key: str, query: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    answer = http.request("GET", f"/v2/catalog/{what}", query=query)
    if answer.status != 200:
        raise explain_runpod_answer(answer)
    listed = answer.json.get(key) if isinstance(answer.json, dict) else None
    if not isinstance(listed, list):
        raise Unknown(f"RunPod's catalogue of {what} cannot be read")
    yield from (entry for entry in listed if isinstance(entry, dict))


def _choose_best_row(known: Sequence[Offer], type_id: str, count: int, cloud: str) -> Offer | None:
    """Return the known row of this type that fits count and cloud best; None if there is none.

    Only its facts about the card and its boot time are used.
    """
    rows = [row for row in known if row.type_id == type_id]
    return max(rows, key=lambda row: (row.gpu_count == count, row.tier == cloud, row.gpu_count), default=None)


def _parse_price(kind: Mapping[str, Any], cloud: str, count: int) -> Micros | None:
    """Return the price of one GPU in a cloud; None if the cloud does not offer that many in one machine."""
    if kind.get(cloud) is not True or _parse_number(_parse_part(kind, "maxCount").get(cloud)) < count:
        return None
    return rate(_parse_part(kind, "price").get(cloud))


def _build_offer(row: Offer, count: int, whole: Micros, cloud: str, now_wall: float) -> Offer:
    stamp = utc(now_wall)
    return row.model_copy(
        update={
            "gpu_count": count,
            "region": "any",
            "rate_micros_per_hour": whole,
            "billing_unit_s": 1,
            "price_source": f"live {stamp[:10]} {stamp[11:16]} UTC",
            "dies_by_itself": "yes · pod key, armed at boot",
            "tier": cloud,
            "spot": False,
        }
    )


def _parse_part(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = entry.get(name)
    return part if isinstance(part, dict) else {}


def _parse_number(value: object) -> int:
    return value if isinstance(value, int) else 0
