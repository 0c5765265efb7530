"""What an account needs once: the role of the outside schedules, and the policy for those who use gpurun."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gpurun.core.errors import SetupError
from gpurun.providers.aws.account import whoami
from gpurun.providers.aws.errors import NOT_ALLOWED, explain_refusal
from gpurun.providers.aws.schedule import ROLE, role_arn
from gpurun.providers.aws.wire import AwsClients, AwsRefused

POLICY = "gpurun-terminate"
_EC2 = (
    "RunInstances CreateTags TerminateInstances DescribeInstances DescribeRegions DescribeInstanceTypeOfferings "
    "DescribeImages DescribeSubnets DescribeSpotPriceHistory DescribeSpotInstanceRequests DescribeSecurityGroups "
    "CreateSecurityGroup AuthorizeSecurityGroupIngress DeleteSecurityGroup DescribeVolumes DeleteVolume "
    "DescribeNetworkInterfaces DeleteNetworkInterface"
)


@dataclass(frozen=True)
class RolePlan:
    """The role as it should be: who may assume it, and what it may do. `arn` is None while there is none."""

    account: str
    partition: str
    arn: str | None
    trust: dict[str, Any]
    policy: dict[str, Any]


def plan_role(wire: AwsClients) -> RolePlan:
    """Return the role for this account, and whether it exists; changes nothing."""
    caller = whoami(wire)
    account, partition = str(caller["Account"]), str(caller["Arn"]).split(":")[1]
    trust = {
        "Effect": "Allow",
        "Principal": {"Service": "scheduler.amazonaws.com"},
        "Action": "sts:AssumeRole",
        # Other accounts' schedules must not use it.
        "Condition": {"StringEquals": {"aws:SourceAccount": account}},
    }
    policy = {
        "Effect": "Allow",
        "Action": "ec2:TerminateInstances",
        "Resource": f"arn:{partition}:ec2:*:{account}:instance/*",
        # Only what gpurun made.
        "Condition": {"Null": {"aws:ResourceTag/gpurun:run": "false"}},
    }
    try:
        arn = role_arn(wire, wire.region)
    except AwsRefused as refused:
        raise _by_hand(refused, _document(trust), _document(policy)) from refused
    return RolePlan(account, partition, arn, _document(trust), _document(policy))


def make_role(wire: AwsClients, plan: RolePlan) -> str:
    """Make the role, or bring the existing one up to date; return its ARN.

    Without the permission for that, a SetupError shows what an administrator must type.
    """
    trust = json.dumps(plan.trust)
    policy = json.dumps(plan.policy)
    region = wire.region
    about = "Lets EventBridge Scheduler end the instances that gpurun rented, at their deadline."
    try:
        if plan.arn is None:
            made = wire.call(
                "iam", region, "create_role", RoleName=ROLE, AssumeRolePolicyDocument=trust, Description=about
            )
            arn = str(made["Role"]["Arn"])
        else:
            arn = plan.arn
            wire.call("iam", region, "update_assume_role_policy", RoleName=ROLE, PolicyDocument=trust)
        wire.call("iam", region, "put_role_policy", RoleName=ROLE, PolicyName=POLICY, PolicyDocument=policy)
    except AwsRefused as refused:
        raise _by_hand(refused, plan.trust, plan.policy) from refused
    return arn


def commands(trust: dict[str, Any], policy: dict[str, Any]) -> list[str]:
    """Return the commands that do the same by hand, for a person with the permission."""
    return [
        f"aws iam create-role --role-name {ROLE} --assume-role-policy-document '{json.dumps(trust)}'",
        f"aws iam put-role-policy --role-name {ROLE} --policy-name {POLICY} --policy-document '{json.dumps(policy)}'",
    ]


def user_policy(plan: RolePlan) -> dict[str, Any]:
    """Return the least permissions that the credentials of a gpurun user need."""
    actions = [f"ec2:{name}" for name in _EC2.split()]
    actions += ["ssm:GetParametersByPath", "pricing:GetProducts", "sts:GetCallerIdentity", "iam:GetRole"]
    actions += [f"scheduler:{name}" for name in ("CreateSchedule", "DeleteSchedule", "ListSchedules")]
    allowed = {"Effect": "Allow", "Action": actions, "Resource": "*"}
    role = f"arn:{plan.partition}:iam::{plan.account}:role/{ROLE}"
    passed = {"Effect": "Allow", "Action": "iam:PassRole", "Resource": role}
    # The first spot instance of an account makes this role.
    service = {"StringLike": {"iam:AWSServiceName": "spot.amazonaws.com"}}
    spot = {"Effect": "Allow", "Action": "iam:CreateServiceLinkedRole", "Resource": "*", "Condition": service}
    return {"Version": "2012-10-17", "Statement": [allowed, passed, spot]}


def _document(statement: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": [statement]}


def _by_hand(refused: AwsRefused, trust: dict[str, Any], policy: dict[str, Any]) -> Exception:
    """Return the error that shows what an administrator must type."""
    if refused.code not in NOT_ALLOWED:
        return explain_refusal(refused)
    what = f"These AWS credentials may not make the role {ROLE} ({refused})."
    hint = "Ask an administrator to run this, then try again:\n" + "\n".join(commands(trust, policy))
    return SetupError("aws.role_not_allowed", what, hint=hint)
