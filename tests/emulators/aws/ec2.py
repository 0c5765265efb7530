"""Actions of EC2 that moto does not emulate well enough."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import ROUND_CEILING, Decimal
from fnmatch import fnmatchcase
from string import ascii_lowercase
from xml.sax.saxutils import escape

from gpurun.providers.aws.errors import quota_in_words
from tests.emulators.aws.calls import AwsError, Call, Reply, ec2_reply
from tests.emulators.aws.rules import Rules
from tests.emulators.aws.world import ACCOUNT, Launched, World

PassOn = Callable[[Call], Reply]
Answer = Callable[[Call, World, Rules, PassOn, bool], Reply]
ANSWERS: dict[str, Answer] = {}
USER_DATA_LIMIT_BYTES = 16_384
_TOKEN_LIMIT = 64
_SPOT = "InstanceMarketOptions.SpotOptions."
_QUOTA = re.compile(r"\((L-[0-9A-F]{8})\)")


def answers(action: str) -> Callable[[Answer], Answer]:
    """Return a decorator that registers a function as the answer to `action`."""

    def keep(function: Answer) -> Answer:
        ANSWERS[action] = function
        return function

    return keep


@answers("RunInstances")
def run_instances(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    """Launch one instance for each client token.

    Raise AwsError if quota or capacity is missing, or the image or the machine type does not exist.
    """
    token, form = call.form.get("ClientToken", ""), call.form
    if len(token) > _TOKEN_LIMIT or not token.isascii():
        raise AwsError("InvalidParameterValue", "ClientToken is not at most 64 ASCII characters")
    digest = hashlib.sha256(json.dumps(sorted(form.items())).encode()).hexdigest()
    remembered = _tokens(world).get((call.region, token))
    if remembered:
        if remembered[0] != digest:
            words = "The request uses the same client token as a previous, but non-identical request"
            raise AwsError("IdempotentParameterMismatch", words)
        return remembered[1]
    type_id, spot = form["InstanceType"], form.get("InstanceMarketOptions.MarketType") == "spot"
    user_data = base64.b64decode(form.get("UserData", "")).decode()
    _check_form(call, rules, len(user_data.encode()))
    zone = _zone(call, world)
    _check_quota(call, world, rules, type_id, spot=spot)
    if not rules.has_capacity(type_id, zone):
        words = f"We currently do not have sufficient {type_id} capacity in the Availability Zone ({zone})."
        raise AwsError("InsufficientInstanceCapacity", words, 500)
    rate = _rate_micros(call, rules, type_id, zone, spot=spot)
    reply = pass_on(call)
    if reply.status != 200:
        return reply
    found = re.search(rb"<instanceId>(i-[0-9a-f]+)</instanceId>", reply.body)
    assert found, reply.body
    instance = Launched(
        id=found[1].decode(),
        region=call.region,
        zone=zone,
        type_id=type_id,
        token=token,
        shutdown=form.get("InstanceInitiatedShutdownBehavior", "stop"),
        user_data=user_data,
        gpu_count=_gpus(type_id),
        launched=world.clock.wall(),
        # The default maximum is the on-demand price.
        spot_usd=form.get(f"{_SPOT}MaxPrice") or rules.usd(type_id, call.region) or "" if spot else "",
    )
    world.add(instance, rate)
    _tag_cards(world, instance, call)
    # moto immediately shows a public address, which is not the guest's.
    body = re.sub(rb"<(ipAddress|dnsName|association)>.*?</\1>", b"", reply.body, flags=re.DOTALL)
    body = _with_spot(body, world)
    # moto takes the launch time from its own clock.
    launched = datetime.fromtimestamp(instance.launched, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z").encode()
    reply = Reply(200, re.sub(rb"(?<=<launchTime>).*?(?=</launchTime>)", launched, body))
    _tokens(world)[call.region, token] = (digest, reply)
    return reply


@answers("DescribeInstances")
def describe_instances(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    """List instances, also by client token; hide those that are too new."""
    here = [instance for instance in world.instances.values() if instance.region == call.region]
    named, filters = call.texts("InstanceId"), call.filters()
    hidden = {instance.id for instance in here if world.hidden(instance)}
    if hidden & set(named):
        raise AwsError("InvalidInstanceID.NotFound", f"The instance IDs {sorted(hidden)} do not exist")
    if not named and (hidden or "client-token" in filters):
        wanted = filters.pop("client-token", ["*"])
        shown = [
            instance.id
            for instance in here
            if instance.id not in hidden and any(fnmatchcase(instance.token, glob) for glob in wanted)
        ]
        if not shown:
            return ec2_reply("DescribeInstances", "<reservationSet/>")
        call.set_filters({**filters, "instance-id": shown})
    reply = pass_on(call)
    return Reply(reply.status, _with_spot(reply.body, world))


@answers("DescribeSpotInstanceRequests")
def describe_spot_instance_requests(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    """List the requests of spot instances, which moto does not keep."""
    items = ""
    for name in call.texts("SpotInstanceRequestId"):
        instance = world.requests.get(name)
        if instance is None or instance.region != call.region or world.hidden(instance):
            raise AwsError("InvalidSpotInstanceRequestID.NotFound", f"The spot instance request ID '{name}' is unknown")
        items += (
            f"<item><spotInstanceRequestId>{name}</spotInstanceRequestId><spotPrice>{instance.spot_usd}</spotPrice>"
        )
        items += f"<type>one-time</type><instanceId>{instance.id}</instanceId></item>"
    return ec2_reply("DescribeSpotInstanceRequests", f"<spotInstanceRequestSet>{items}</spotInstanceRequestSet>")


@answers("TerminateInstances")
def terminate_instances(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    """Begin to terminate the instances; fail as a whole if one of them does not exist or is still hidden."""
    items = ""
    named = [world.instances.get(identifier) for identifier in call.texts("InstanceId")]
    for instance, identifier in zip(named, call.texts("InstanceId"), strict=True):
        if instance is None or instance.region != call.region or world.hidden(instance):
            raise AwsError("InvalidInstanceID.NotFound", f"The instance ID '{identifier}' does not exist")
    for instance in named:
        assert instance is not None
        before = instance.state
        if not lie:
            world.end(instance.id)
        states = "".join(
            f"<{name}><code>0</code><name>{state}</name></{name}>"
            for name, state in (("currentState", "shutting-down"), ("previousState", before))
        )
        items += f"<item><instanceId>{instance.id}</instanceId>{states}</item>"
    return ec2_reply("TerminateInstances", f"<instancesSet>{items}</instancesSet>")


@answers("DeleteSecurityGroup")
def delete_security_group(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    """Delete the group, unless a living instance's network card uses it. With `lie`, claim it without deleting it."""
    for instance in world.alive:
        for card in world._inner(instance).nics.values() if instance.region == call.region else ():
            if call.form.get("GroupId") in {group.id for group in card.group_set}:
                words = f"resource {call.form['GroupId']} has a dependent object"
                raise AwsError("DependencyViolation", words)
    return Reply(200, b"<DeleteSecurityGroupResponse/>") if lie else pass_on(call)


@answers("DescribeRegions")
def describe_regions(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    items = "".join(
        f"<item><regionName>{name}</regionName><optInStatus>opt-in-not-required</optInStatus></item>"
        for name in rules.regions
    )
    return ec2_reply("DescribeRegions", f"<regionInfo>{items}</regionInfo>")


@answers("DescribeSubnets")
def describe_subnets(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    if rules.no_default_vpc and "default-for-az" in call.filters():
        return ec2_reply("DescribeSubnets", "<subnetSet/>")
    return pass_on(call)


@answers("DescribeImages")
def describe_images(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    """List the requested images of AWS, with the disks and the platform that `rules` sets."""
    items = ""
    for identifier in call.texts("ImageId"):
        if not rules.knows_image(identifier, call.region):
            raise AwsError("InvalidAMIID.NotFound", f"The image id '[{identifier}]' does not exist")
        disks = "".join(
            f"<item><deviceName>/dev/sd{letter}{'1' if letter == 'a' else ''}</deviceName>"
            f"<ebs><volumeSize>{size_gb}</volumeSize><volumeType>gp3</volumeType></ebs></item>"
            for letter, size_gb in zip(ascii_lowercase, [rules.image_gb, *rules.image_more_gb], strict=False)
        )
        disks += "<item><deviceName>/dev/sdz</deviceName><virtualName>ephemeral0</virtualName></item>"
        product = f"<item><productCode>{rules.image_product}</productCode><type>marketplace</type></item>"
        items += f"<item><imageId>{identifier}</imageId><imageState>available</imageState>"
        items += f"<platformDetails>{rules.image_platform}</platformDetails>"
        items += f"<productCodes>{product}</productCodes>" if rules.image_product else ""
        items += f"<rootDeviceName>/dev/sda1</rootDeviceName><blockDeviceMapping>{disks}</blockDeviceMapping></item>"
    return ec2_reply("DescribeImages", f"<imagesSet>{items}</imagesSet>")


@answers("DescribeSpotPriceHistory")
def describe_spot_price_history(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    items = ""
    for type_id in call.texts("InstanceType"):
        for zone in (f"{call.region}{letter}" for letter in "abc"):
            price = rules.spot(type_id, zone)
            if price is not None:
                items += f"<item><instanceType>{type_id}</instanceType><spotPrice>{price}</spotPrice>"
                items += f"<availabilityZone>{zone}</availabilityZone></item>"
    return ec2_reply("DescribeSpotPriceHistory", f"<spotPriceHistorySet>{items}</spotPriceHistorySet>")


@answers("GetConsoleOutput")
def get_console_output(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    instance = world.instances.get(call.form["InstanceId"])
    if instance is None:
        raise AwsError("InvalidInstanceID.NotFound", "The instance does not exist")
    text = base64.b64encode((instance.guest.log if instance.guest else "").encode()).decode()
    return ec2_reply("GetConsoleOutput", f"<instanceId>{instance.id}</instanceId><output>{escape(text)}</output>")


def _with_spot(body: bytes, world: World) -> bytes:
    """Add to each spot instance what moto leaves out: that it is spot, and the id of its spot request."""
    for request, instance in world.requests.items():
        name = f"<instanceId>{instance.id}</instanceId>"
        more = f"<instanceLifecycle>spot</instanceLifecycle><spotInstanceRequestId>{request}</spotInstanceRequestId>"
        body = body.replace(name.encode(), (name + more).encode())
    return body


def _tokens(world: World) -> dict[tuple[str, str], tuple[str, Reply]]:
    """Return the digest of the request and the reply, by region and client token."""
    remembered: dict[tuple[str, str], tuple[str, Reply]] = world.__dict__.setdefault("client_tokens", {})
    return remembered


def _check_form(call: Call, rules: Rules, user_data_bytes: int) -> None:
    form = call.form
    if not rules.knows_image(form["ImageId"], call.region):
        raise AwsError("InvalidAMIID.NotFound", f"The image id '[{form['ImageId']}]' does not exist")
    if user_data_bytes > USER_DATA_LIMIT_BYTES:
        raise AwsError("InvalidParameterValue", "User data is limited to 16384 bytes")
    size = form.get("BlockDeviceMapping.1.Ebs.VolumeSize")
    if size is not None and int(size) < rules.image_gb:
        words = f"Volume of size {size}GB is smaller than snapshot, expect size >= {rules.image_gb}GB"
        raise AwsError("InvalidBlockDeviceMapping", words)
    if _gpus(form["InstanceType"]) is None:
        raise AwsError("InvalidParameterValue", f"Invalid value '{form['InstanceType']}' for InstanceType.")


def _zone(call: Call, world: World) -> str:
    """Return the zone of the requested subnet; without one, the first zone of the region."""
    subnet = call.form.get("NetworkInterface.1.SubnetId") or call.form.get("SubnetId")
    if not subnet:
        return f"{call.region}a"
    return str(world._backend(call.region).get_subnet(subnet).availability_zone)


def _check_quota(call: Call, world: World, rules: Rules, type_id: str, *, spot: bool) -> None:
    """Raise AwsError if a launch would exceed the vCPU quota of its family in the region.

    Every instance that is not terminated counts.
    """

    def code_of(kind: str) -> str:
        found = _QUOTA.search(quota_in_words(kind, call.region, spot=spot))
        assert found
        return found[1]

    code = code_of(type_id)
    beside = [other for other in world.alive if other.region == call.region and bool(other.spot_usd) == spot]
    used = sum(_vcpus(other.type_id) for other in beside if code_of(other.type_id) == code)
    if used + _vcpus(type_id) > rules.quotas[code]:
        if spot:
            raise AwsError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        words = f"You have requested more vCPU capacity than your current vCPU limit of {rules.quotas[code]} allows"
        raise AwsError("VcpuLimitExceeded", words)


def _rate_micros(call: Call, rules: Rules, type_id: str, zone: str, *, spot: bool) -> int:
    """Return the micro-dollars per hour: the on-demand price, or the spot price, which must not exceed the bid."""
    price = rules.spot(type_id, zone) if spot else rules.usd(type_id, call.region)
    if price is None:
        raise AwsError("Unsupported", f"Your requested instance type ({type_id}) is not supported in {zone}.")
    bid = call.form.get(f"{_SPOT}MaxPrice")
    if spot and bid is not None and Decimal(bid) < Decimal(price):
        raise AwsError("SpotMaxPriceTooLow", f"Your Spot request price of {bid} is lower than the minimum {price}.")
    return int((Decimal(price) * 1_000_000).to_integral_value(ROUND_CEILING))


def _tag_cards(world: World, instance: Launched, call: Call) -> None:
    """Tag the network cards as the launch requests, because moto leaves these tags out."""
    for key, value in call.form.items():
        found = re.fullmatch(r"TagSpecification\.(\d+)\.ResourceType", key)
        if not found or value != "network-interface":
            continue
        prefix = f"TagSpecification.{found[1]}.Tag."
        for name, tag in call.form.items():
            if name.startswith(prefix) and name.endswith(".Key"):
                tag_value = call.form[name.removesuffix(".Key") + ".Value"]
                for card in world._inner(instance).nics.values():
                    card.add_tag(tag, tag_value)


def _facts(type_id: str) -> dict[str, object]:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    facts: dict[str, object] = INSTANCE_TYPES.get(type_id, {})
    return facts


def _vcpus(type_id: str) -> int:
    info = _facts(type_id).get("VCpuInfo")
    return int(info["DefaultVCpus"]) if isinstance(info, dict) else 0


def _gpus(type_id: str) -> int | None:
    """Return how many GPUs a machine type has; None if there is no such type."""
    if not _facts(type_id):
        return None
    info = _facts(type_id).get("GpuInfo")
    return sum(int(gpu["Count"]) for gpu in info["Gpus"]) if isinstance(info, dict) else 0


__all__ = ["ACCOUNT", "ANSWERS"]
