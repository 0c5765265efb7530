"""Reads who owns the credentials, and which of the permissions that gpurun needs are missing."""

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
# Dry runs: EC2 answers whether it would carry out the request, without doing it. Some actions report a missing resource
# before a missing permission, so only a clear "not allowed" counts.
_DRY_RUNS: tuple[tuple[str, dict[str, Any]], ...] = (
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
    """Return the account: the caller's identity, the missing permissions, and the clock skew."""
    caller = whoami(wire)
    missing = _list_missing_permissions(wire)
    warning = _describe_expiry(wire.key_ends_wall())
    return Account(
        provider="aws",
        identity=str(caller.get("Arn") or caller.get("Account")),
        missing=(*missing, warning) if warning else missing,
        clock_ahead_s=wire.clock_ahead_s,
    )


def _describe_expiry(ends_wall: float) -> str:
    """Return a warning about credentials that expire; "" if they do not."""
    if ends_wall == inf:
        return ""
    when = f"expire at {utc(ends_wall)}" if ends_wall else "are temporary"
    return f"credentials that outlast the run (these {when}; without them only the machine's own timer ends it)"


def whoami(wire: AwsClients) -> dict[str, Any]:
    """Return the caller's account, ARN and user id; SetupError if AWS does not accept the credentials."""
    try:
        return wire.call("sts", wire.region, "get_caller_identity")
    except AwsRefused as refused:
        raise explain_refusal(refused) from refused


def mark_of(wire: AwsClients) -> str:
    """Return the mark of the account. Reading the account's number needs no permission."""
    number = str(whoami(wire).get("Account") or "")
    if not number:
        raise Unknown("AWS does not report the account of these credentials")
    return mark_of_account("aws", number)


def may_launch(wire: AwsClients, region: str) -> bool:
    """Return whether the credentials could launch in a region; False only for a clear "not allowed"."""
    operation, parameters = _DRY_RUNS[0]
    return not _is_action_denied(partial(wire.call, "ec2", region, operation, DryRun=True, **parameters))


def _list_missing_permissions(wire: AwsClients) -> tuple[str, ...]:
    """Return the IAM names of the actions that AWS refuses. An action without a clear answer does not count."""
    region = wire.region
    probes: dict[str, Callable[[], object]] = {
        operation: partial(wire.call, "ec2", region, operation, DryRun=True, **parameters)
        for operation, parameters in _DRY_RUNS
    }
    probes["get_parameters_by_path"] = partial(
        wire.call, "ssm", region, "get_parameters_by_path", Path=PARAMETERS, MaxResults=1
    )
    probes["get_products"] = partial(
        wire.call, "pricing", PRICING_REGION, "get_products", ServiceCode="AmazonEC2", MaxResults=1
    )
    with ThreadPoolExecutor(max_workers=len(probes)) as pool:
        denied = list(pool.map(_is_action_denied, probes.values()))
    return tuple(action_of(operation) for operation, is_denied in zip(probes, denied, strict=True) if is_denied)


def _is_action_denied(probe: Callable[[], object]) -> bool:
    try:
        probe()
    except AwsRefused as refused:
        return refused.code in NOT_ALLOWED
    except (Unknown, Rejected):
        return False
    return False
