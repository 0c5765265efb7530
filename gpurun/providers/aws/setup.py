"""Sets up an AWS account once: the role of the termination schedules, and the policy for gpurun's users."""

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
    """The intended role: `trust` is who may assume it, `policy` what it may do. `arn` is None if it does not exist."""

    account: str
    partition: str
    arn: str | None
    trust: dict[str, Any]
    policy: dict[str, Any]


def plan_role(wire: AwsClients) -> RolePlan:
    """Return the role for this account and its ARN if it exists, without changing anything."""
    caller = whoami(wire)
    account, partition = str(caller["Account"]), str(caller["Arn"]).split(":")[1]
    trust = {
        "Effect": "Allow",
        "Principal": {"Service": "scheduler.amazonaws.com"},
        "Action": "sts:AssumeRole",
        # Schedules of other accounts must not use the role.
        "Condition": {"StringEquals": {"aws:SourceAccount": account}},
    }
    policy = {
        "Effect": "Allow",
        "Action": "ec2:TerminateInstances",
        "Resource": f"arn:{partition}:ec2:*:{account}:instance/*",
        # Only instances that gpurun launched.
        "Condition": {"Null": {"aws:ResourceTag/gpurun:run": "false"}},
    }
    try:
        arn = role_arn(wire, wire.region)
    except AwsRefused as refused:
        raise _admin_error(refused, _build_policy_document(trust), _build_policy_document(policy)) from refused
    return RolePlan(account, partition, arn, _build_policy_document(trust), _build_policy_document(policy))


def make_role(wire: AwsClients, plan: RolePlan) -> str:
    """Create the role, or update the existing one. Return its ARN.

    Without the permission, raises a SetupError with the commands that an administrator must run.
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
        raise _admin_error(refused, plan.trust, plan.policy) from refused
    return arn


def admin_commands(trust: dict[str, Any], policy: dict[str, Any]) -> list[str]:
    """Return the commands with which an administrator creates the role by hand."""
    return [
        f"aws iam create-role --role-name {ROLE} --assume-role-policy-document '{json.dumps(trust)}'",
        f"aws iam put-role-policy --role-name {ROLE} --policy-name {POLICY} --policy-document '{json.dumps(policy)}'",
    ]


def user_policy(plan: RolePlan) -> dict[str, Any]:
    """Return the policy with the minimum permissions that a gpurun user needs."""
    actions = [f"ec2:{name}" for name in _EC2.split()]
    actions += ["ssm:GetParametersByPath", "pricing:GetProducts", "sts:GetCallerIdentity", "iam:GetRole"]
    actions += [f"scheduler:{name}" for name in ("CreateSchedule", "DeleteSchedule", "ListSchedules")]
    allowed = {"Effect": "Allow", "Action": actions, "Resource": "*"}
    role = f"arn:{plan.partition}:iam::{plan.account}:role/{ROLE}"
    passed = {"Effect": "Allow", "Action": "iam:PassRole", "Resource": role}
    # The first spot instance of an account creates this service-linked role.
    service = {"StringLike": {"iam:AWSServiceName": "spot.amazonaws.com"}}
    spot = {"Effect": "Allow", "Action": "iam:CreateServiceLinkedRole", "Resource": "*", "Condition": service}
    return {"Version": "2012-10-17", "Statement": [allowed, passed, spot]}


def _build_policy_document(statement: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": [statement]}


def _admin_error(refused: AwsRefused, trust: dict[str, Any], policy: dict[str, Any]) -> Exception:
    """Return the error with the commands that an administrator must run."""
    if refused.code not in NOT_ALLOWED:
        return explain_refusal(refused)
    what = f"These AWS credentials may not create the role {ROLE} ({refused})."
    hint = "Ask an administrator to run this, then try again:\n" + "\n".join(admin_commands(trust, policy))
    return SetupError("aws.role_not_allowed", what, hint=hint)
