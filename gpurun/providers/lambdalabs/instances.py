"""Reads instances from Lambda's answers, and writes the body of a launch."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Any

from gpurun.core.machine_token import parse_token
from gpurun.core.records import Address, Instance, InstanceState, Order
from gpurun.providers.base import Rejected, Unknown
from gpurun.providers.lambdalabs.parse import get_nested, hourly_price

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
    "preempted": InstanceState.STOPPED,  # It is not known whether its billing has ended.
}


def is_id(value: object) -> bool:
    """Return whether the value has the form of an id at Lambda."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def check_lambda_id(identifier: str) -> str:
    """Return the id unchanged; Rejected if it is malformed, because it becomes part of a URL."""
    if not is_id(identifier):
        raise Rejected(f"{identifier!r} does not have the form of a Lambda id")
    return identifier


def parse_lambda_instance(entry: Any) -> Instance:
    """Return an instance of the account; Unknown if it has no id, because it could be any instance.

    The token is read from its tags or, if they are lost, from its name.
    """
    if not isinstance(entry, dict) or not is_id(entry.get("id")):
        raise Unknown("Lambda listed an instance without an id")
    tags = _parse_tags(entry)
    token = parse_token(tags.get(TOKEN), str(entry.get("name")))
    kind, status = get_nested(entry, "instance_type"), str(entry.get("status") or "")
    gpus = get_nested(kind, "specs").get("gpus")
    return Instance(
        id=entry["id"],
        provider="lambda",
        token=token.text if token else "",
        run=token.run_or(tags.get(RUN)) if token else "",
        state=_STATES.get(status, InstanceState.UNKNOWN),
        address=_build_address(entry.get("ip")),
        gpu_count=gpus if isinstance(gpus, int) else 0,
        rate_micros_per_hour=hourly_price(kind.get("price_cents_per_hour")),
        deadline_wall=token.deadline_or(tags.get(DEADLINE)) if token else None,
        region=str(get_nested(entry, "region").get("name") or ""),
        type_id=str(kind.get("name") or ""),
        said=status,
    )


def make_launched_instance(order: Order, identifier: str) -> Instance:
    """Return a new instance from its order and its id, because the answer of a launch has nothing else."""
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
    """Return the body of a launch without the SSH key; Rejected if token or region cannot be used."""
    if parse_token(order.token) is None:
        raise Rejected(f"{order.token!r} is not a token, so an instance with it could not be found again")
    if order.offer.region in ("", "any"):
        raise Rejected("a launch at Lambda needs the name of a region")
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


def _parse_tags(entry: dict[str, Any]) -> dict[str, str]:
    listed = entry.get("tags")
    entries = [tag for tag in listed if isinstance(tag, dict)] if isinstance(listed, list) else []
    return {str(tag.get("key")): str(tag.get("value")) for tag in entries}


def _build_address(ip: Any) -> Address | None:
    """Return the address of the instance's sshd; None before it has an IP address.

    A host name is not accepted, because it would be resolved by DNS.
    """
    try:
        return Address(kind="ssh", host=str(ip_address(ip)), port=22, user=USER) if isinstance(ip, str) else None
    except ValueError:
        return None
