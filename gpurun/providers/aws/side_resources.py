"""What is beside an instance: its firewall group, and whatever a broken launch or end may have left.

All of it carries the token, and the journal has the token before the first of it is made, so nothing can be lost.
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
from gpurun.providers.aws.tags import by_tag, make_tag_specifications, owner
from gpurun.providers.aws.wire import AwsClients, AwsRefused, AwsReply
from gpurun.providers.base import Rejected, Unknown

GROUP, VOLUME, INTERFACE, SCHEDULE = "security group", "volume", "network interface", "schedule"
ADDRESS_URL = "https://checkip.amazonaws.com"
_LOOPBACK = "127.0.0.0/8"
_SETTLE_S, _SETTLE_POLL_S = 20.0, 2.0
# Kind, the listing and its key, the id in it, and the status in which it no longer belongs to a machine.
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
    """Return the public address of this machine, as AWS sees it."""
    try:
        words = Http(ADDRESS_URL, headers={}, clock=clock, name="AWS").request("GET", "/", timeout_s=15.0).text
        return str(IPv4Address(words.strip()))
    except (Unknown, ValueError) as error:
        raise Rejected(
            f"the public address of this machine could not be read from {ADDRESS_URL} ({error}), "
            "so the machine's firewall could let nobody in"
        ) from error


def make_group(wire: AwsClients, order: Order, vpc: str, my_address: Callable[[], str]) -> str:
    """Return the firewall group of a run, which lets in SSH from here alone; it is made once for a token."""
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
            # The first answer was lost, but the group was made.
            group = find_firewall_group(wire, region, order.token) if refused.code == "InvalidGroup.Duplicate" else ""
            if not group:
                raise
    if not group:  # The SDK accepts any XML as an answer, as in `AwsClients.pages`.
        raise Unknown(f"AWS {region} answered create_security_group without its group")
    let_in(wire, region, group, my_address)
    return group


def let_in(wire: AwsClients, region: str, group: str, my_address: Callable[[], str]) -> None:
    """Open the SSH port of a group to the address that this laptop has now; harmless if it is open."""
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
    """Return what carries the token in a region, but no machines and nothing that still belongs to one."""
    found: list[Leftover] = []
    for kind, listing, key, name, status in _LISTINGS:
        filters: list[dict[str, Any]] = [by_tag(token)]
        if status:
            filters.append({"Name": "status", "Values": [status]})
        for entry in wire.pages("ec2", region, listing, key, Filters=filters):
            found.extend(_leftover(region, kind, str(entry[name]), entry, token))
    for named in schedules_in(wire, region, token):
        entry = {"id": named.text, "token": named.text, "run": named.run, "deadline_wall": named.deadline_wall}
        found.append(Leftover(provider="aws", kind=SCHEDULE, region=region, **entry))
    return found


def remove_leftover(wire: AwsClients, leftover: Leftover) -> None:
    """Request the removal of one; Unknown while something still needs it."""
    if leftover.kind == SCHEDULE:
        end_schedule(wire, leftover.region, leftover.id)
        return
    if leftover.kind not in _REMOVALS:
        raise Rejected(f"gpurun makes no {leftover.kind} at AWS")
    operation, name = _REMOVALS[leftover.kind]
    parameters: dict[str, Any] = {name: leftover.id}
    try:
        wire.call("ec2", leftover.region, operation, **parameters)
    except AwsRefused as refused:
        if refused.code in _IN_USE:
            raise Unknown(f"the {leftover.kind} {leftover.id} is still in use ({refused.code})") from refused
        if refused.code not in _NOT_THERE:
            raise explain_refusal(refused) from refused


def _leftover(region: str, kind: str, identifier: str, entry: AwsReply, token: str | None) -> Iterator[Leftover]:
    """Yield one thing, if it is gpurun's and carries the token."""
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
    found = list(wire.pages("ec2", region, "describe_security_groups", "SecurityGroups", Filters=[by_tag(token)]))
    return str(found[0]["GroupId"]) if found else ""
