"""An instance as EC2 tells it."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from gpurun.core.records import Address, Instance, InstanceState
from gpurun.providers.aws.image import USER
from gpurun.providers.aws.tags import by_client_token, by_tag, owner
from gpurun.providers.aws.wire import AwsClients, AwsRefused, Told
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
    """Region and EC2's own id of `us-east-1/i-0123456789abcdef0`; Rejected for what no instance is called.

    The region is part of the id, so that a holder of an id needs no search, and no default region can mislead it.
    """
    named = _ID.fullmatch(instance_id)
    if named is None:
        raise Rejected(f"{instance_id!r} is not the id of an EC2 instance (region/i-0123456789abcdef0)")
    return named[1], named[2]


def parse_ec2_instance(region: str, told: Told) -> Instance:
    """One instance; Unknown when it has no id, since it may be any."""
    identifier = f"{region}/{told.get('InstanceId')}"
    if not _ID.fullmatch(identifier):
        raise Unknown(f"AWS {region} told of an instance without an id")
    token, run, deadline = owner(told)
    name = str((told.get("State") or {}).get("Name") or "")
    state = _STATES.get(name, InstanceState.UNKNOWN)
    host = str(told.get("PublicIpAddress") or "")
    launched = told.get("LaunchTime")
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
        type_id=str(told.get("InstanceType") or ""),
        said=" · ".join(word for word in (name, _why(told)) if word),
        ended_wall=_ended(told) if state in (InstanceState.GONE, InstanceState.STOPPED) else None,
    )


def read_instance(wire: AwsClients, instance_id: str) -> Instance:
    """One instance by its id; GONE when its region says that there is none."""
    region, identifier = split_instance_id(instance_id)
    gone = Instance(id=instance_id, provider="aws", token="", run="", state=InstanceState.GONE, region=region)
    try:
        listed = list(wire.pages("ec2", region, "describe_instances", "Reservations", InstanceIds=[identifier]))
    except AwsRefused as refused:
        if refused.code in NOT_THERE:
            return gone
        raise
    for told in (one for held in listed for one in held.get("Instances") or ()):
        if told.get("InstanceId") == identifier:
            return parse_ec2_instance(region, told)
    return gone


def instances_in(wire: AwsClients, region: str, token: str | None) -> list[Instance]:
    """All that carries the token in a region, by tag and by the key it was launched with."""
    found: dict[str, Instance] = {}
    for wanted in (by_tag(token), by_client_token(token)):
        for held in wire.pages("ec2", region, "describe_instances", "Reservations", Filters=[wanted]):
            for told in held.get("Instances") or ():
                one = parse_ec2_instance(region, told)
                if one.token and token in (None, one.token):
                    found[one.id] = one
    return list(found.values())


def _why(told: Told) -> str:
    """EC2's own reason for the state, such as a spot interruption."""
    words = str((told.get("StateReason") or {}).get("Message") or "")
    if "SpotInstanceTermination" in words or "SpotInstanceShutdown" in words:
        return f"spot interruption: {words}"
    return words


def _ended(told: Told) -> float | None:
    """When it ended, as EC2 says in words: `User initiated (2026-11-20 12:00:00 GMT)`."""
    found = _ENDED.search(str(told.get("StateTransitionReason") or ""))
    try:
        return datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp() if found else None
    except ValueError:
        return None
