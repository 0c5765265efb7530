"""The knife outside the machine: a one-time schedule that ends the instance at its deadline, and then itself.

It needs a role that `gpurun aws setup` makes once for an account. Without it the machine's own timer stands alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from math import ceil

from gpurun.core.clock import utc
from gpurun.core.machine_token import PREFIXES, Token, parse_token
from gpurun.core.records import Order
from gpurun.providers.aws.errors import NOT_ALLOWED, explain_refusal
from gpurun.providers.aws.wire import AwsClients, AwsRefused

ROLE = "gpurun-terminate"
TARGET = "arn:{partition}:scheduler:::aws-sdk:ec2:terminateInstances"
_GROUP = "default"
_NOT_THERE = "ResourceNotFoundException"
_log = logging.getLogger(__name__)


def role_arn(wire: AwsClients, region: str) -> str | None:
    """The role that a schedule acts under; None where the account has none."""
    try:
        return str(wire.call("iam", region, "get_role", RoleName=ROLE)["Role"]["Arn"])
    except AwsRefused as refused:
        if refused.code in ("NoSuchEntity", "NoSuchEntityException"):
            return None
        raise


def arm_schedule(wire: AwsClients, order: Order, identifier: str) -> bool:
    """Have the instance ended at its deadline; False, and a warning in the log, where that cannot be.

    It is asked for once the instance exists, so that nothing here may raise: the instance would be lost with it.
    """
    region = order.offer.region
    try:
        role = role_arn(wire, region)
        if role is None:
            return False
        wire.call(
            "scheduler",
            region,
            "create_schedule",
            Name=order.token,
            GroupName=_GROUP,
            ClientToken=order.token,
            ScheduleExpression=f"at({utc(ceil(order.deadline_wall))[:19]})",
            ScheduleExpressionTimezone="UTC",
            FlexibleTimeWindow={"Mode": "OFF"},
            ActionAfterCompletion="DELETE",
            Target={
                "Arn": TARGET.format(partition=role.split(":")[1]),
                "RoleArn": role,
                "Input": json.dumps({"InstanceIds": [identifier]}),
                "RetryPolicy": {"MaximumRetryAttempts": 185, "MaximumEventAgeInSeconds": 86_400},
            },
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the instance exists and must be told of.
        if not (isinstance(error, AwsRefused) and error.code == "ConflictException"):
            _log.warning("aws: no schedule ends %s from outside, its own timer does: %s", identifier, error)
            return False
    return True


def schedules_in(wire: AwsClients, region: str, token: str | None) -> Iterator[Token]:
    """The tokens that name the schedules for a token, or of all; none where they may not be listed.

    A schedule costs nothing and ends with its deadline, so that not being allowed to see one holds nothing up.
    """
    if not wire.serves("scheduler", region):
        return
    try:
        for prefix in (token,) if token else PREFIXES:
            asked = {"GroupName": _GROUP, "NamePrefix": prefix}
            for told in wire.pages("scheduler", region, "list_schedules", "Schedules", **asked):
                named = parse_token(str(told.get("Name")))
                if named and token in (None, named.text):
                    yield named
    except AwsRefused as refused:
        if refused.code not in NOT_ALLOWED:
            raise explain_refusal(refused) from refused


def end_schedule(wire: AwsClients, region: str, name: str) -> None:
    """Take one away; harmless when it has fired and is gone."""
    try:
        wire.call("scheduler", region, "delete_schedule", Name=name, GroupName=_GROUP)
    except AwsRefused as refused:
        if refused.code != _NOT_THERE:
            raise explain_refusal(refused) from refused
