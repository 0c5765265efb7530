"""How a thing at AWS says whose it is: run, token and deadline, in its tags."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

from gpurun.core.machine_token import PREFIXES, parse_token
from gpurun.core.records import Order

RUN, TOKEN, DEADLINE = "gpurun:run", "gpurun:token", "gpurun:deadline"


def tags_of(order: Order) -> list[dict[str, str]]:
    """The tags of everything that is made for an order."""
    told = {RUN: order.run, TOKEN: order.token, DEADLINE: str(int(order.deadline_wall)), "Name": order.token}
    return [{"Key": key, "Value": value} for key, value in told.items()]


def make_tag_specifications(order: Order, *kinds: str) -> list[dict[str, Any]]:
    """The same, as it is asked for in the call that makes a thing."""
    return [{"ResourceType": kind, "Tags": tags_of(order)} for kind in kinds]


def owner(told: Mapping[str, Any]) -> tuple[str, str, float | None]:
    """Token, run and deadline of a thing; empty where it is not gpurun's.

    Tags can be taken off and edited; the client token and the name with which a thing was made cannot.
    """
    tags = {str(tag.get("Key")): str(tag.get("Value")) for tag in told.get("Tags") or told.get("TagSet") or ()}
    made_as = (str(told.get("ClientToken") or "").partition(".")[0], str(told.get("GroupName") or ""))
    token = parse_token(*made_as, tags.get(TOKEN), tags.get("Name"))
    return (token.text, token.run_or(tags.get(RUN)), token.deadline_or(tags.get(DEADLINE))) if token else ("", "", None)


def client_token(token: str, zone: str) -> str:
    """The idempotency key of one launch: another zone is another request, so it takes another key."""
    return f"{token}.{zone[-1]}" if zone else token


def client_tokens(token: str) -> list[str]:
    """Every key that a launch for the token can have had."""
    return [token, *(f"{token}.{letter}" for letter in ascii_lowercase)]


def by_tag(token: str | None) -> dict[str, Any]:
    """The filter for what carries a token, or (None) for all that is gpurun's."""
    return {"Name": f"tag:{TOKEN}", "Values": [token]} if token else {"Name": "tag-key", "Values": [TOKEN]}


def by_client_token(token: str | None) -> dict[str, Any]:
    """The same by the idempotency key, which nobody can take off an instance."""
    return {"Name": "client-token", "Values": client_tokens(token) if token else [f"{one}*" for one in PREFIXES]}
