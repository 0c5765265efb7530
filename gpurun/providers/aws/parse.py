"""Reads instances from EC2's answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime

from gpurun.core.records import Address, Instance, InstanceState
from gpurun.providers.aws.image import USER
from gpurun.providers.aws.tags import client_token_filter, owner, tag_filter
from gpurun.providers.aws.wire import AwsClients, AwsRefused, AwsReply
from gpurun.providers.base import Rejected, Unknown

_STATES = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.STOPPING,
    "stopping": InstanceState.STOPPED,
    "stopped": InstanceState.STOPPED,
    "terminated": InstanceState.GONE,
}
_ID = re.compile(r"([a-z]{2,4}(?:-[a-z]+)+-\d{1,2})/(i-[0-9a-f]{8,32})")
_ENDED = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
NOT_THERE = frozenset({"InvalidInstanceID.NotFound"})


def split_instance_id(instance_id: str) -> tuple[str, str]:
    """Split an id such as `us-east-1/i-0123456789abcdef0` into region and EC2's id; Rejected if it is malformed.

    The region is part of the id, so an instance is found without a search and regardless of the default region.
    """
    named = _ID.fullmatch(instance_id)
    if named is None:
        raise Rejected(f"{instance_id!r} is not the id of an EC2 instance (region/i-0123456789abcdef0)")
    return named[1], named[2]


def parse_ec2_instance(region: str, entry: AwsReply) -> Instance:
    """Return an instance from its entry; Unknown if the entry has no id, because it could be any instance."""
    identifier = f"{region}/{entry.get('InstanceId')}"
    if not _ID.fullmatch(identifier):
        raise Unknown(f"AWS {region} listed an instance without an id")
    token, run, deadline = owner(entry)
    name = str((entry.get("State") or {}).get("Name") or "")
    state = _STATES.get(name, InstanceState.UNKNOWN)
    host = str(entry.get("PublicIpAddress") or "")
    launched = entry.get("LaunchTime")
    return Instance(
        id=identifier,
        provider="aws",
        token=token,
        run=run,
        state=state,
        address=Address(kind="ssh", host=host, port=22, user=USER) if host else None,
        created_wall=launched.timestamp() if isinstance(launched, datetime) else None,
        deadline_wall=deadline,
        region=region,
        type_id=str(entry.get("InstanceType") or ""),
        said=" · ".join(word for word in (name, _parse_state_reason(entry)) if word),
        ended_wall=_parse_end_wall(entry) if state in (InstanceState.GONE, InstanceState.STOPPED) else None,
    )


def read_instance(wire: AwsClients, instance_id: str, parse: Callable[[str, AwsReply], Instance]) -> Instance:
    """Return one instance by its id, as `parse` reads it; GONE if the region does not list it."""
    region, identifier = split_instance_id(instance_id)
    gone = Instance(id=instance_id, provider="aws", token="", run="", state=InstanceState.GONE, region=region)
    try:
        listed = list(wire.pages("ec2", region, "describe_instances", "Reservations", InstanceIds=[identifier]))
    except AwsRefused as refused:
        if refused.code in NOT_THERE:
            return gone
        raise
    for entry in (instance for held in listed for instance in held.get("Instances") or ()):
        if entry.get("InstanceId") == identifier:
            return parse(region, entry)
    return gone


def instances_in(wire: AwsClients, region: str, token: str | None) -> list[Instance]:
    """Return a region's instances that carry the token (None: all of gpurun's) in a tag or idempotency key."""
    found: dict[str, Instance] = {}
    for selection in (tag_filter(token), client_token_filter(token)):
        for held in wire.pages("ec2", region, "describe_instances", "Reservations", Filters=[selection]):
            for entry in held.get("Instances") or ():
                instance = parse_ec2_instance(region, entry)
                if instance.token and token in (None, instance.token):
                    found[instance.id] = instance
    return list(found.values())


def _parse_state_reason(entry: AwsReply) -> str:
    """Return EC2's reason for the present state, such as a spot interruption; "" if there is none."""
    words = str((entry.get("StateReason") or {}).get("Message") or "")
    if "SpotInstanceTermination" in words or "SpotInstanceShutdown" in words:
        return f"spot interruption: {words}"
    return words


def _parse_end_wall(entry: AwsReply) -> float | None:
    """Return when an instance ended, from text like `User initiated (2026-11-20 12:00:00 GMT)`; None without one."""
    found = _ENDED.search(str(entry.get("StateTransitionReason") or ""))
    try:
        return datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp() if found else None
    except ValueError:
        return None
