"""Schedules the termination of an instance at its deadline with EventBridge, outside the machine.

The schedule runs once and then deletes itself. It needs a role that `gpurun aws setup` creates once for an account.
Without the role there is only the machine's own timer.
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
    """Return the ARN of the role that the schedules use; None if the account does not have the role."""
    try:
        return str(wire.call("iam", region, "get_role", RoleName=ROLE)["Role"]["Arn"])
    except AwsRefused as refused:
        if refused.code in ("NoSuchEntity", "NoSuchEntityException"):
            return None
        raise


def arm_schedule(wire: AwsClients, order: Order, identifier: str) -> bool:
    """Schedule the termination of the instance at its deadline. Return False if there is no role, or if that fails.

    A failure is logged as a warning and never raised: the instance exists, and an error would lose its id.
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
    except Exception as error:  # noqa: BLE001 - whatever failed, the instance exists and must be returned.
        if not (isinstance(error, AwsRefused) and error.code == "ConflictException"):
            _log.warning("aws: %s has no termination schedule, only its own timer: %s", identifier, error)
            return False
    return True


def schedules_in(wire: AwsClients, region: str, token: str | None) -> Iterator[Token]:
    """Yield the token of each schedule, only of those for `token` if it is given.

    Yields nothing without the permission to list schedules. That is harmless: a schedule costs nothing, and deletes
    itself after the deadline.
    """
    if not wire.serves("scheduler", region):
        return
    try:
        for prefix in (token,) if token else PREFIXES:
            query = {"GroupName": _GROUP, "NamePrefix": prefix}
            for entry in wire.pages("scheduler", region, "list_schedules", "Schedules", **query):
                named = parse_token(str(entry.get("Name")))
                if named and token in (None, named.text):
                    yield named
    except AwsRefused as refused:
        if refused.code not in NOT_ALLOWED:
            raise explain_refusal(refused) from refused


def end_schedule(wire: AwsClients, region: str, name: str) -> None:
    """Delete a schedule; harmless if it no longer exists."""
    try:
        wire.call("scheduler", region, "delete_schedule", Name=name, GroupName=_GROUP)
    except AwsRefused as refused:
        if refused.code != _NOT_THERE:
            raise explain_refusal(refused) from refused
