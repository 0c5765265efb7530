"""Whose credentials these are, and which of the actions that gpurun needs they may not do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.records import Account
from gpurun.providers.account_ids import mark_of_account
from gpurun.providers.aws.errors import NOT_ALLOWED, action_of, explain_refusal
from gpurun.providers.aws.image import PARAMETERS
from gpurun.providers.aws.offers import PRICING_REGION
from gpurun.providers.aws.wire import AwsClients, AwsRefused
from gpurun.providers.base import Rejected, Unknown

_NO_INSTANCE, _NO_IMAGE = "i-00000000000000000", "ami-00000000000000000"
# Dry runs: EC2 answers whether it would act, and does not act. Which objection to a missing thing comes first differs
# by action, so only a clear "not allowed" counts.
_DRY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("run_instances", {"ImageId": _NO_IMAGE, "InstanceType": "t3.micro", "MinCount": 1, "MaxCount": 1}),
    ("terminate_instances", {"InstanceIds": [_NO_INSTANCE]}),
    ("describe_instances", {}),
    ("describe_security_groups", {}),
    ("describe_volumes", {}),
    ("describe_network_interfaces", {}),
    ("describe_subnets", {}),
    ("describe_instance_type_offerings", {}),
    ("describe_spot_price_history", {}),
    ("describe_spot_instance_requests", {}),
    ("create_security_group", {"GroupName": "gpurun-dry-run", "Description": "gpurun"}),
    ("delete_security_group", {"GroupId": "sg-00000000000000000"}),
)


def account_of(wire: AwsClients) -> Account:
    """Return who asks, what is missing, and how far the clocks are apart."""
    caller = whoami(wire)
    missing = _missing(wire)
    worry = _worry(wire.key_ends_wall())
    return Account(
        provider="aws",
        identity=str(caller.get("Arn") or caller.get("Account")),
        missing=(*missing, worry) if worry else missing,
        clock_ahead_s=wire.clock_ahead_s,
    )


def _worry(ends_wall: float) -> str:
    """Return the risk of credentials that expire, in words; "" for those that do not."""
    if ends_wall == inf:
        return ""
    when = f"end at {utc(ends_wall)}" if ends_wall else "are temporary"
    return f"credentials that outlast the run (these {when}; without them only the machine's own timer ends it)"


def whoami(wire: AwsClients) -> dict[str, Any]:
    """Return account, ARN and user id from AWS; SetupError if it does not accept the credentials."""
    try:
        return wire.call("sts", wire.region, "get_caller_identity")
    except AwsRefused as refused:
        raise explain_refusal(refused) from refused


def mark_of(wire: AwsClients) -> str:
    """Return the mark of the account, which anyone with its credentials may ask for."""
    number = str(whoami(wire).get("Account") or "")
    if not number:
        raise Unknown("AWS does not say whose credentials these are")
    return mark_of_account("aws", number)


def may_launch(wire: AwsClients, region: str) -> bool:
    """Return whether anything could be started in a region; only a clear "not allowed" is a no."""
    operation, parameters = _DRY[0]
    return not _denied(partial(wire.call, "ec2", region, operation, DryRun=True, **parameters))


def _missing(wire: AwsClients) -> tuple[str, ...]:
    """Return the refused actions, by their IAM names; an action without a clear answer does not count as missing."""
    region = wire.region
    asks: dict[str, Callable[[], object]] = {
        operation: partial(wire.call, "ec2", region, operation, DryRun=True, **asked) for operation, asked in _DRY
    }
    asks["get_parameters_by_path"] = partial(
        wire.call, "ssm", region, "get_parameters_by_path", Path=PARAMETERS, MaxResults=1
    )
    asks["get_products"] = partial(
        wire.call, "pricing", PRICING_REGION, "get_products", ServiceCode="AmazonEC2", MaxResults=1
    )
    with ThreadPoolExecutor(max_workers=len(asks)) as pool:
        denied = list(pool.map(_denied, asks.values()))
    return tuple(action_of(operation) for operation, no in zip(asks, denied, strict=True) if no)


def _denied(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except AwsRefused as refused:
        return refused.code in NOT_ALLOWED
    except (Unknown, Rejected):
        return False
    return False
