"""Writes and reads the tags that identify a resource at AWS: run, token and deadline."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

from gpurun.core.machine_token import PREFIXES, parse_token
from gpurun.core.records import Order

RUN, TOKEN, DEADLINE = "gpurun:run", "gpurun:token", "gpurun:deadline"


def tags_of(order: Order) -> list[dict[str, str]]:
    """Return the tags for every resource that is created for an order."""
    tags = {RUN: order.run, TOKEN: order.token, DEADLINE: str(int(order.deadline_wall)), "Name": order.token}
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def make_tag_specifications(order: Order, *kinds: str) -> list[dict[str, Any]]:
    """Return the tags for these kinds of resources, in the form that a creating call expects."""
    return [{"ResourceType": kind, "Tags": tags_of(order)} for kind in kinds]


def owner(entry: Mapping[str, Any]) -> tuple[str, str, float | None]:
    """Return token, run and deadline of a resource; ("", "", None) if it is not gpurun's.

    Tags can be edited and removed. The client token and the group name cannot, so they come first.
    """
    tags = {str(tag.get("Key")): str(tag.get("Value")) for tag in entry.get("Tags") or entry.get("TagSet") or ()}
    fixed_names = (str(entry.get("ClientToken") or "").partition(".")[0], str(entry.get("GroupName") or ""))
    token = parse_token(*fixed_names, tags.get(TOKEN), tags.get("Name"))
    return (token.text, token.run_or(tags.get(RUN)), token.deadline_or(tags.get(DEADLINE))) if token else ("", "", None)


def client_token(token: str, zone: str) -> str:
    """Return the idempotency key of a launch. Each zone needs its own, because its request is different."""
    return f"{token}.{zone[-1]}" if zone else token


def client_tokens(token: str) -> list[str]:
    """Return every idempotency key that a launch for the token may have used."""
    return [token, *(f"{token}.{letter}" for letter in ascii_lowercase)]


def tag_filter(token: str | None) -> dict[str, Any]:
    """Return the filter for resources that are tagged with the token (None: with any token of gpurun's)."""
    return {"Name": f"tag:{TOKEN}", "Values": [token]} if token else {"Name": "tag-key", "Values": [TOKEN]}


def client_token_filter(token: str | None) -> dict[str, Any]:
    """Return the filter by idempotency key, which cannot be removed from an instance, unlike a tag."""
    return {"Name": "client-token", "Values": client_tokens(token) if token else [f"{prefix}*" for prefix in PREFIXES]}
