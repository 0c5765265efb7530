"""The end from outside the machine: a one-time schedule that ends the instance at its deadline, and then itself.

It needs a role that `gpurun aws setup` makes once for an account. Without it there is only the machine's own timer.
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
    """Return the role that a schedule uses; None if the account has none."""
    try:
        return str(wire.call("iam", region, "get_role", RoleName=ROLE)["Role"]["Arn"])
    except AwsRefused as refused:
        if refused.code in ("NoSuchEntity", "NoSuchEntityException"):
            return None
        raise


def arm_schedule(wire: AwsClients, order: Order, identifier: str) -> bool:
    """Schedule the end of the instance at its deadline; False, with a warning in the log, if that fails.

    The instance exists already, so nothing here may raise: the instance would be lost with it.
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
    except Exception as error:  # noqa: BLE001 - whatever it is, the instance exists and must be reported.
        if not (isinstance(error, AwsRefused) and error.code == "ConflictException"):
            _log.warning("aws: no outside schedule ends %s, only its own timer: %s", identifier, error)
            return False
    return True


def schedules_in(wire: AwsClients, region: str, token: str | None) -> Iterator[Token]:
    """Yield the tokens of the schedules for a token, or for all; none if they may not be listed.

    A schedule costs nothing and ends with its deadline, so a missing permission to list them blocks nothing.
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
    """Delete one; harmless if it has fired and is gone."""
    try:
        wire.call("scheduler", region, "delete_schedule", Name=name, GroupName=_GROUP)
    except AwsRefused as refused:
        if refused.code != _NOT_THERE:
            raise explain_refusal(refused) from refused
