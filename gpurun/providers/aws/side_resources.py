"""Creates the firewall group of an instance, and lists and removes what a launch or termination may leave.

Every such resource carries the token. The journal records the token before the first of them is created, so all of them
can be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from typing import Any

from gpurun.core.clock import Clock, ticks
from gpurun.core.records import Leftover, Order
from gpurun.providers._http import Http
from gpurun.providers.aws.errors import explain_refusal
from gpurun.providers.aws.schedule import end_schedule, schedules_in
from gpurun.providers.aws.tags import make_tag_specifications, owner, tag_filter
from gpurun.providers.aws.wire import AwsClients, AwsRefused, AwsReply
from gpurun.providers.base import Rejected, Unknown

GROUP, VOLUME, INTERFACE, SCHEDULE = "security group", "volume", "network interface", "schedule"
ADDRESS_URL = "https://checkip.amazonaws.com"
_LOOPBACK = "127.0.0.0/8"
_SETTLE_S, _SETTLE_POLL_S = 20.0, 2.0
# Kind, operation, the key of its list, the key of the id, and the status of a resource that no machine uses.
_LISTINGS = (
    (GROUP, "describe_security_groups", "SecurityGroups", "GroupId", ""),
    (VOLUME, "describe_volumes", "Volumes", "VolumeId", "available"),
    (INTERFACE, "describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId", "available"),
)
_REMOVALS = {
    GROUP: ("delete_security_group", "GroupId"),
    VOLUME: ("delete_volume", "VolumeId"),
    INTERFACE: ("delete_network_interface", "NetworkInterfaceId"),
}
_NOT_THERE = frozenset({"InvalidGroup.NotFound", "InvalidVolume.NotFound", "InvalidNetworkInterfaceID.NotFound"})
_IN_USE = frozenset({"DependencyViolation", "VolumeInUse", "InvalidNetworkInterface.InUse", "InvalidParameterValue"})


def public_address(clock: Clock) -> str:
    """Return this machine's public IPv4 address, as AWS sees it; Rejected if it cannot be read."""
    try:
        words = Http(ADDRESS_URL, headers={}, clock=clock, name="AWS").request("GET", "/", timeout_s=15.0).text
        return str(IPv4Address(words.strip()))
    except (Unknown, ValueError) as error:
        raise Rejected(
            f"the public address of this machine could not be read from {ADDRESS_URL} ({error}), "
            "so the firewall of the rented machine could not admit it"
        ) from error


def make_group(wire: AwsClients, order: Order, vpc: str, my_address: Callable[[], str]) -> str:
    """Return the id of the order's firewall group, which admits SSH only from here; create it if it is missing."""
    region = order.offer.region
    group = find_firewall_group(wire, region, order.token)
    if not group:
        try:
            made = wire.call(
                "ec2",
                region,
                "create_security_group",
                GroupName=order.token,
                Description=f"gpurun {order.run}: SSH from its owner",
                VpcId=vpc,
                TagSpecifications=make_tag_specifications(order, "security-group"),
            )
            group = str(made.get("GroupId") or "")
        except AwsRefused as refused:
            # An earlier request created the group, but its answer was lost.
            group = find_firewall_group(wire, region, order.token) if refused.code == "InvalidGroup.Duplicate" else ""
            if not group:
                raise
    if not group:  # The SDK accepts any XML as an answer: see `AwsClients.pages`.
        raise Unknown(f"AWS {region} answered create_security_group without its group")
    let_in(wire, region, group, my_address)
    return group


def let_in(wire: AwsClients, region: str, group: str, my_address: Callable[[], str]) -> None:
    """Open the SSH port of a group to this computer's present address; harmless if it is open already."""
    source = _LOOPBACK if wire.is_near("ec2", region) else f"{my_address()}/32"
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": source}]}
    for elapsed in ticks(wire.clock, _SETTLE_POLL_S, _SETTLE_S):
        try:
            wire.call("ec2", region, "authorize_security_group_ingress", GroupId=group, IpPermissions=[rule])
            return
        except AwsRefused as refused:
            if refused.code == "InvalidPermission.Duplicate":
                return
            if refused.code != "InvalidGroup.NotFound" or elapsed >= _SETTLE_S:
                raise


def leftovers_in(wire: AwsClients, region: str, token: str | None) -> list[Leftover]:
    """Return a region's resources that carry the token, except machines and what is still attached to a machine."""
    found: list[Leftover] = []
    for kind, listing, key, name, status in _LISTINGS:
        filters: list[dict[str, Any]] = [tag_filter(token)]
        if status:
            filters.append({"Name": "status", "Values": [status]})
        for entry in wire.pages("ec2", region, listing, key, Filters=filters):
            found.extend(_build_leftover(region, kind, str(entry[name]), entry, token))
    for named in schedules_in(wire, region, token):
        entry = {"id": named.text, "token": named.text, "run": named.run, "deadline_wall": named.deadline_wall}
        found.append(Leftover(provider="aws", kind=SCHEDULE, region=region, **entry))
    return found


def remove_leftover(wire: AwsClients, leftover: Leftover) -> None:
    """Request the removal of a leftover; Unknown while another resource still uses it."""
    if leftover.kind == SCHEDULE:
        end_schedule(wire, leftover.region, leftover.id)
        return
    if leftover.kind not in _REMOVALS:
        raise Rejected(f"gpurun does not create resources of the kind {leftover.kind} at AWS")
    operation, name = _REMOVALS[leftover.kind]
    parameters: dict[str, Any] = {name: leftover.id}
    try:
        wire.call("ec2", leftover.region, operation, **parameters)
    except AwsRefused as refused:
        if refused.code in _IN_USE:
            raise Unknown(f"the {leftover.kind} {leftover.id} is still in use ({refused.code})") from refused
        if refused.code not in _NOT_THERE:
            raise explain_refusal(refused) from refused


def _build_leftover(region: str, kind: str, identifier: str, entry: AwsReply, token: str | None) -> Iterator[Leftover]:
    """Yield the leftover of an entry if it carries the token (None: any token of gpurun's)."""
    carried, run, deadline = owner(entry)
    if carried and token in (None, carried):
        yield Leftover(
            provider="aws",
            kind=kind,
            id=identifier,
            run=run,
            token=carried,
            region=region,
            billed=kind == VOLUME,
            deadline_wall=deadline,
        )


def find_firewall_group(wire: AwsClients, region: str, token: str) -> str:
    """Return the id of the firewall group that carries a token; "" if there is none."""
    found = list(wire.pages("ec2", region, "describe_security_groups", "SecurityGroups", Filters=[tag_filter(token)]))
    return str(found[0]["GroupId"]) if found else ""
