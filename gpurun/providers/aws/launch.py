"""Launches one instance. If EC2 has no capacity, the launch is tried in each zone of the region."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from gpurun.core.clock import ticks
from gpurun.core.errors import SetupError
from gpurun.core.money import Micros
from gpurun.core.records import Instance, Order
from gpurun.providers.aws.errors import judge_launch_refusal
from gpurun.providers.aws.image import Image
from gpurun.providers.aws.tags import client_token, make_tag_specifications
from gpurun.providers.aws.wire import AwsClients, AwsRefused, AwsReply
from gpurun.providers.base import NoCapacity, Rejected, Unknown

USER_DATA_LIMIT_BYTES = 16_384
DISK_KIND = "gp3"
# A new firewall group takes a while to become visible everywhere.
_SETTLE_S, _SETTLE_POLL_S = 20.0, 2.0


@dataclass(frozen=True)
class Network:
    """A VPC for a machine, and the id of its subnet in each zone."""

    vpc: str
    subnets: dict[str, str]


def network_of(wire: AwsClients, region: str) -> Network:
    """Return the default VPC and its subnets; Rejected if the region has no default VPC."""
    filters = [{"Name": "default-for-az", "Values": ["true"]}]
    found = list(wire.pages("ec2", region, "describe_subnets", "Subnets", Filters=filters))
    if not found:
        make = f"aws ec2 create-default-vpc --region {region}"
        raise Rejected(f"{region} has no default VPC; make one (`{make}`) or use another region")
    vpc = str(found[0]["VpcId"])
    zones = {str(subnet["AvailabilityZone"]): str(subnet["SubnetId"]) for subnet in found if subnet["VpcId"] == vpc}
    return Network(vpc, zones)


def launch(
    wire: AwsClients, order: Order, image: Image, network: Network, group: str, finish: Callable[[AwsReply], Instance]
) -> Instance:
    """Launch an instance. Return what `finish` makes of EC2's answer.

    The first request leaves the zone to EC2; the next ones name each zone in turn. If an answer is unclear, there may
    be an instance, so no other zone is tried. Repeating a request is safe: for a known ClientToken, EC2 returns the
    instance that the first request made.
    """
    region, offer = order.offer.region, order.offer
    refused = NoCapacity("no zone was tried")
    for zone, subnet in _list_zones_to_try(wire, order, network):
        request = request_for(order, image, group, zone, subnet)
        try:
            answer = _send_launch(wire, region, request)
        except AwsRefused as error:
            judged = judge_launch_refusal(error, offer.type_id, region, spot=offer.spot)
            if isinstance(judged, Unknown):
                judged.again = partial(_repeat_launch, wire, region, request, finish)
            if not isinstance(judged, NoCapacity):
                raise judged from error
            refused = NoCapacity(f"{offer.type_id} in {zone or region}: {judged}")
            continue
        except Unknown as error:
            raise Unknown(str(error), again=partial(_repeat_launch, wire, region, request, finish)) from error
        return finish(_parse_first_instance(answer))
    raise refused


def _repeat_launch(
    wire: AwsClients, region: str, request: dict[str, Any], finish: Callable[[AwsReply], Instance]
) -> Instance:
    """Repeat a launch after its answer was lost. Return the instance; Unknown if EC2 does not return one."""
    try:
        return finish(_parse_first_instance(_send_launch(wire, region, request)))
    except (AwsRefused, SetupError) as error:
        raise Unknown(str(error)) from error


def request_for(order: Order, image: Image, group: str, zone: str, subnet: str) -> dict[str, Any]:
    """Return the launch request. The same order always gives the same bytes, as an idempotency key requires."""
    if order.disk_gb and order.disk_gb < image.least_gb:
        raise Rejected(
            f"the image {image.id} needs a disk of {image.least_gb} GB, but the plan has only {order.disk_gb} GB; "
            f"plan with --set hardware.disk_gb={image.least_gb}"
        )
    interface: dict[str, Any] = {
        "DeviceIndex": 0,
        "Groups": [group],
        "AssociatePublicIpAddress": True,
        "DeleteOnTermination": True,
    }
    disk = {"VolumeType": DISK_KIND, "DeleteOnTermination": True}
    kinds = ["instance", "volume", "network-interface"]
    request: dict[str, Any] = {
        "ImageId": image.id,
        "InstanceType": order.offer.type_id,
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": client_token(order.token, zone),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "UserData": _build_user_data(order),
        "NetworkInterfaces": [{**interface, "SubnetId": subnet} if subnet else interface],
        "BlockDeviceMappings": [
            {"DeviceName": image.root_device, "Ebs": {**disk, "VolumeSize": order.disk_gb or image.least_gb}}
        ],
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
    }
    if order.offer.spot:
        request["InstanceMarketOptions"] = _build_spot_options(order.offer.rate_micros_per_hour)
        kinds.append("spot-instances-request")
    return {**request, "TagSpecifications": make_tag_specifications(order, *kinds)}


def _list_zones_to_try(wire: AwsClients, order: Order, network: Network) -> Iterator[tuple[str, str]]:
    """Yield the zone and subnet of each launch. The first pair is empty, which leaves the zone to EC2.

    The zones are looked up only if that launch fails.
    """
    yield "", ""
    try:
        selling = zones_selling(wire, order.offer.region, [order.offer.type_id])
    except Unknown as error:  # Every launch so far was refused, so there is no instance.
        raise NoCapacity(f"no other zone could be looked up: {error}") from error
    yield from (
        (zone, network.subnets[zone]) for zone in sorted(selling[order.offer.type_id]) if zone in network.subnets
    )


def zones_selling(wire: AwsClients, region: str, types: list[str]) -> dict[str, list[str]]:
    """Return for each machine type the zones of the region that offer it; an empty list if none does."""
    zones: dict[str, list[str]] = {kind: [] for kind in types}
    filters = [{"Name": "instance-type", "Values": types}]
    for offering in wire.pages(
        "ec2", region, "describe_instance_type_offerings", "InstanceTypeOfferings",
        LocationType="availability-zone", Filters=filters,
    ):  # fmt: skip
        zones.get(str(offering.get("InstanceType")), []).append(str(offering.get("Location")))
    return zones


def _send_launch(wire: AwsClients, region: str, request: dict[str, Any]) -> AwsReply:
    """Send a launch. Retry it with the same idempotency key until EC2 sees the new firewall group."""
    for elapsed in ticks(wire.clock, _SETTLE_POLL_S, _SETTLE_S):
        try:
            return wire.call("ec2", region, "run_instances", once=True, **request)
        except AwsRefused as refused:
            if refused.code != "InvalidGroup.NotFound" or elapsed >= _SETTLE_S:
                raise
    raise Rejected(f"{region} does not see the firewall group that was created for this launch")


def _parse_first_instance(answer: AwsReply) -> AwsReply:
    found: list[AwsReply] = answer.get("Instances") or [{}]
    return found[0]


def _build_user_data(order: Order) -> str:
    """Return the user data that arms the machine's timer and installs its host key; Rejected without the run's keys."""
    from gpurun.providers import guard

    if order.keys is None:
        raise Rejected("an instance needs the run's keys before it boots")
    text: str = guard.aws_user_data(deadline_wall=order.deadline_wall, lease_s=order.lease_s, keys=order.keys)
    if len(text.encode()) > USER_DATA_LIMIT_BYTES:
        raise Rejected(f"the machine's user data is larger than {USER_DATA_LIMIT_BYTES} bytes")
    return text


def _build_spot_options(rate: Micros) -> dict[str, Any]:
    """Return the options of a spot launch. Above the agreed price, AWS reclaims the machine instead of billing more."""
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    price = format(Decimal(rate).scaleb(-6), "f")
    return {"MarketType": "spot", "SpotOptions": {**options, "MaxPrice": price}}
