"""Actions of services other than EC2 that moto does not emulate well enough.

They are public parameters, prices, quotas, schedules and identities.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.emulators.aws.calls import AwsError, Call, Reply, json_reply
from tests.emulators.aws.rules import Rules
from tests.emulators.aws.world import ACCOUNT, World

PassOn = Callable[[Call], Reply]
Answer = Callable[[Call, World, Rules, PassOn, bool], Reply]
_PAGE = 10
_IDENTITY = (
    '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>{}'
    "</GetCallerIdentityResult></GetCallerIdentityResponse>"
)
_REGIONS_OF_PRICING = ("us-east-1", "eu-central-1", "ap-south-1")


def get_parameters_by_path(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    """List AWS's public parameters, ten to a page, as the service does."""
    size = int(call.json.get("MaxResults") or _PAGE)
    if size > _PAGE:
        raise AwsError("ValidationException", "Member must have value less than or equal to 10")
    found = [
        (name, value) for name, value in rules.parameters(call.region).items() if name.startswith(call.json["Path"])
    ]
    begin = int(call.json.get("NextToken") or 0)
    page = [{"Name": n, "Type": "String", "Value": v, "Version": 1} for n, v in found[begin : begin + size]]
    more = {"NextToken": str(begin + size)} if begin + size < len(found) else {}
    return json_reply({"Parameters": page, **more})


def get_products(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    """Return two products of a machine type: the on-demand price, and a capacity block, another kind of sale."""
    if call.region not in _REGIONS_OF_PRICING:
        raise AwsError("UnknownEndpoint", "Pricing is not served here", 404)
    filters = {row["Field"]: row["Value"] for row in call.json.get("Filters", ())}
    type_id, region = filters.get("instanceType", ""), filters.get("regionCode", "")
    price = rules.usd(type_id, region) if type_id else None
    products = [_product(type_id, region, price, "OnDemand"), _product(type_id, region, "99", "CapacityBlock")]
    return json_reply({"FormatVersion": "aws_v1", "PriceList": products if price else []})


def get_service_quota(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    code = call.json["QuotaCode"]
    if code not in rules.quotas:
        raise AwsError("NoSuchResourceException", "The request failed because the specified quota does not exist.")
    return json_reply({"Quota": {"ServiceCode": "ec2", "QuotaCode": code, "Value": float(rules.quotas[code])}})


def create_schedule(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    """Create a schedule whose role exists and trusts the service; a schedule in the past fires immediately."""
    from moto.iam.models import iam_backends

    arn = call.json["Target"]["RoleArn"]
    roles = [role for role in iam_backends[ACCOUNT]["aws"].roles.values() if role.arn == arn]
    if not roles or "scheduler.amazonaws.com" not in json.dumps(roles[0].assume_role_policy_document):
        words = "The execution role you provide must allow AWS EventBridge Scheduler to assume the role."
        raise AwsError("ValidationException", words)
    return pass_on(call)


def get_caller_identity(call: Call, world: World, rules: Rules, pass_on: PassOn, lie: bool) -> Reply:
    """Let moto describe the emulated account; return a made-up user for a key of another account."""
    if call.key not in rules.strangers:
        return pass_on(call)
    number = rules.strangers[call.key]
    fields = f"<Arn>arn:aws:iam::{number}:user/else</Arn><UserId>AIDAELSE</UserId><Account>{number}</Account>"
    return Reply(200, _IDENTITY.format(fields).encode())


def _product(type_id: str, region: str, price: str | None, option: str) -> str:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": price}, "beginRange": "0", "endRange": "Inf"}
    attributes = {"instanceType": type_id, "regionCode": region, "marketoption": option, "operatingSystem": "Linux"}
    terms = {"OnDemand": {"SKU.TERM": {"priceDimensions": {"SKU.TERM.RATE": dimension}}}}
    return json.dumps({"product": {"productFamily": "Compute Instance", "attributes": attributes}, "terms": terms})


ANSWERS: dict[str, Answer] = {
    "GetParametersByPath": get_parameters_by_path,
    "GetProducts": get_products,
    "GetServiceQuota": get_service_quota,
    "CreateSchedule": create_schedule,
    "GetCallerIdentity": get_caller_identity,
}
