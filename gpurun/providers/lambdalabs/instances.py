"""An instance as Lambda tells it, and an order as Lambda wants it."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Any

from gpurun.core.machine_token import parse_token
from gpurun.core.records import Address, Instance, InstanceState, Order
from gpurun.providers.base import Rejected, Unknown
from gpurun.providers.lambdalabs.parse import get_nested, hourly

USER = "ubuntu"
RUN, TOKEN, DEADLINE = "gpurun-run", "gpurun-token", "gpurun-deadline"

AILING = "unhealthy"
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_STATES = {
    "booting": InstanceState.PENDING,
    "active": InstanceState.RUNNING,
    AILING: InstanceState.RUNNING,  # It may recover, and it is billed either way.
    "terminating": InstanceState.STOPPING,
    "terminated": InstanceState.GONE,
    "preempted": InstanceState.STOPPED,  # Nobody says that its billing has ended.
}


def is_id(told: object) -> bool:
    """Whether this can be the id of a thing."""
    return isinstance(told, str) and _ID.fullmatch(told) is not None


def check_lambda_id(identifier: str) -> str:
    """The id of a thing; one of another shape is never made part of a URL."""
    if not is_id(identifier):
        raise Rejected(f"{identifier!r} is not an id at Lambda")
    return identifier


def parse_lambda_instance(told: Any) -> Instance:
    """An instance of anybody's; Unknown when it has no id, since it may be any.

    Its tags say whose it is or, where they are lost, its name.
    """
    if not isinstance(told, dict) or not is_id(told.get("id")):
        raise Unknown("Lambda told of an instance without an id")
    tags = _tags(told)
    token = parse_token(tags.get(TOKEN), str(told.get("name")))
    kind, said = get_nested(told, "instance_type"), str(told.get("status") or "")
    gpus = get_nested(kind, "specs").get("gpus")
    return Instance(
        id=told["id"],
        provider="lambda",
        token=token.text if token else "",
        run=token.run_or(tags.get(RUN)) if token else "",
        state=_STATES.get(said, InstanceState.UNKNOWN),
        address=_address(told.get("ip")),
        gpu_count=gpus if isinstance(gpus, int) else 0,
        rate_micros_per_hour=hourly(kind.get("price_cents_per_hour")),
        deadline_wall=token.deadline_or(tags.get(DEADLINE)) if token else None,
        region=str(get_nested(told, "region").get("name") or ""),
        type_id=str(kind.get("name") or ""),
        said=said,
    )


def make_launched_instance(order: Order, identifier: str) -> Instance:
    """What is known of an instance from its launch alone, whose answer is nothing but an id."""
    return Instance(
        id=identifier,
        provider="lambda",
        token=order.token,
        run=order.run,
        state=InstanceState.PENDING,
        deadline_wall=float(int(order.deadline_wall)),
        region=order.offer.region,
    )


def make_launch_body(order: Order, user_data: str) -> dict[str, Any]:
    """The body of a launch, but for its SSH key."""
    if parse_token(order.token) is None:
        raise Rejected(f"{order.token!r} is no token: what carried it would not be found again")
    if order.offer.region in ("", "any"):
        raise Rejected("Lambda launches only in a region that is named")
    tags = {RUN: order.run, TOKEN: order.token, DEADLINE: str(int(order.deadline_wall))}
    body: dict[str, Any] = {
        "region_name": order.offer.region,
        "instance_type_name": order.offer.type_id,
        "name": order.token,
        "hostname": order.token,
        "user_data": user_data,
        "tags": [{"key": key, "value": value} for key, value in tags.items()],
    }
    if order.image:
        family, _, name = order.image.rpartition(":")
        body["image"] = {"family": name} if family == "family" else {"id": order.image}
    return body


def _tags(told: dict[str, Any]) -> dict[str, str]:
    listed = told.get("tags")
    entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return {str(one.get("key")): str(one.get("value")) for one in entries}


def _address(ip: Any) -> Address | None:
    """Where its sshd is, once it has an address; a name in its place would be looked up, and is not taken."""
    try:
        return Address(kind="ssh", host=str(ip_address(ip)), port=22, user=USER) if isinstance(ip, str) else None
    except ValueError:
        return None
