"""Reads the lowest accepted bid for spot pods and creates spot pods. Only GraphQL can do that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpurun.core.errors import SetupError
from gpurun.core.money import Micros, times
from gpurun.core.records import Instance, InstanceState, Offer, Order
from gpurun.core.secrets import Secret
from gpurun.providers.base import NoCapacity, Unknown
from gpurun.providers.errors import RejectedFor
from gpurun.providers.runpod.graphql import GraphqlRefused, ask, quote_text
from gpurun.providers.runpod.parse import rate, refusal_in_words
from gpurun.providers.runpod.pods import (
    DISK_GB,
    IMAGE,
    IMAGE_CUDA,
    arguments_of,
    cuda_of,
    make_pod_environment,
    parse_pod,
)

# Hosts need a driver that runs the image, and a public address. The catalogue's prices are read for the same hosts.
_FIT = f"minCudaVersion:{quote_text(IMAGE_CUDA)},supportPublicIp:true"


@dataclass(frozen=True)
class _Bid:
    """A bid for one GPU-hour: `text` is RunPod's own figure, to be sent back; `micros` is in micro-dollars."""

    text: str
    micros: Micros


def spot_offers(offers: Sequence[Offer], key: Secret, base_url: str) -> list[Offer]:
    """Return these offers as spot pods at the lowest bid, without those for which RunPod accepts no bid now."""
    bids = _query_lowest_bids(offers, key, base_url) if offers else []
    return [
        offer.model_copy(
            update={
                "spot": True,
                "rate_micros_per_hour": times(bid.micros, offer.gpu_count),
                "on_demand_micros_per_hour": offer.rate_micros_per_hour,
            }
        )
        for offer, bid in zip(offers, bids, strict=True)
        if bid is not None
    ]


def create_spot(order: Order, key: Secret, base_url: str, guard: str) -> Instance:
    """Bid the current lowest price for a pod, but never more than the agreed price. Return the new pod.

    The answer has few fields, so the pod's type and price are read later. Raises the same errors as `create`.
    """
    try:
        (bid,) = _query_lowest_bids([order.offer], key, base_url)
    except SetupError as error:  # No pod was requested yet.
        raise RejectedFor(error) from error
    except Unknown as error:
        raise NoCapacity(f"the lowest bid cannot be read: {error}") from error
    if bid is None or times(bid.micros, order.offer.gpu_count) > order.offer.rate_micros_per_hour:
        raise NoCapacity("no spot pod is available at the agreed price")
    try:
        data = ask(_build_mutation(order, bid.text, base_url, guard), key, base_url)
    except GraphqlRefused as error:
        raise refusal_in_words(str(error)) from error
    except SetupError as error:
        raise RejectedFor(error) from error
    pod = data.get("podRentInterruptable")
    if not isinstance(pod, dict):
        raise Unknown("RunPod's GraphQL returned neither a pod nor an error")
    created = parse_pod({**pod, "cost": pod.get("costPerHr")})
    deadline_wall = float(int(order.deadline_wall))
    return created.model_copy(update={"state": InstanceState.PENDING, "deadline_wall": deadline_wall})


def _query_lowest_bids(offers: Sequence[Offer], key: Secret, base_url: str) -> list[_Bid | None]:
    """Return the lowest bid for one GPU of each offer, read in one query; None where RunPod accepts no bid."""
    queries = " ".join(
        f"o{number}:gpuTypes(input:{{id:{quote_text(offer.type_id)}}}){{lowestPrice(input:{{gpuCount:{offer.gpu_count},"
        f"secureCloud:{'true' if offer.tier == 'secure' else 'false'},{_FIT}}}){{stockStatus minimumBidPrice}}}}"
        for number, offer in enumerate(offers)
    )
    try:
        data = ask(f"query{{{queries}}}", key, base_url)
        return [_parse_bid(data[f"o{number}"]) for number in range(len(offers))]
    except (GraphqlRefused, KeyError, TypeError, IndexError) as error:
        raise Unknown(f"RunPod's GraphQL returned no lowest bid: {error}") from error


def _parse_bid(kinds: Any) -> _Bid | None:
    price = kinds[0]["lowestPrice"] if kinds else None
    if not price or not price["stockStatus"]:
        return None
    micros = rate(price["minimumBidPrice"])
    return None if micros is None else _Bid(f"{price['minimumBidPrice']:f}", micros)


def _build_mutation(order: Order, bid: str, base_url: str, guard: str) -> str:
    """Return the mutation that rents a spot pod. All strings are escaped; its numbers need no escape."""
    offer, image = order.offer, order.image or IMAGE
    env = [
        f"{{key:{quote_text(name)},value:{quote_text(value)}}}"
        for name, value in make_pod_environment(order, base_url).items()
    ]
    fields = {
        "name": quote_text(order.token),
        "imageName": quote_text(image),
        "gpuTypeId": quote_text(offer.type_id),
        "gpuCount": str(offer.gpu_count),
        "bidPerGpu": bid,
        "cloudType": (offer.tier or "secure").upper(),
        "containerDiskInGb": str(order.disk_gb or DISK_GB),
        "volumeInGb": "0",
        "ports": quote_text("22/tcp"),
        "supportPublicIp": "true",
        "dockerArgs": quote_text(arguments_of(guard)),
        "env": f"[{','.join(env)}]",
    }
    cuda = cuda_of(image)
    if cuda:
        fields["minCudaVersion"] = quote_text(cuda)
    if offer.region not in ("", "any"):
        fields["dataCenterId"] = quote_text(offer.region)
    data = ",".join(f"{name}:{value}" for name, value in fields.items())
    return f"mutation{{podRentInterruptable(input:{{{data}}}){{id name costPerHr imageName machineId desiredStatus}}}}"
