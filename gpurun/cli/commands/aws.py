"""`gpurun aws setup`: create the role with which AWS ends a machine at its deadline."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.help_panels import make_verb_group
from gpurun.cli.options import Yes
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(help="Set up an AWS account for gpurun.", cls=make_verb_group(), rich_markup_mode=None)


@verb(app, "aws setup", examples=["gpurun aws setup", "gpurun aws setup --yes", "gpurun aws setup --policy"])
def setup(
    session: Session,
    policy: Annotated[
        bool, typer.Option("--policy", help="Only show the policy that gpurun's IAM user needs.")
    ] = False,
    yes: Yes = False,
) -> Result:
    """Create the role that lets AWS end a machine at its deadline."""
    import json

    from gpurun.core.clock import SystemClock
    from gpurun.core.errors import Declined
    from gpurun.providers.aws.setup import admin_commands, make_role, plan_role, user_policy
    from gpurun.providers.aws.wire import AwsClients

    wire = AwsClients(SystemClock())
    plan = plan_role(wire)
    if policy:
        document = user_policy(plan)
        return Result(data={"policy": document}, text=json.dumps(document, indent=2))
    there = plan.arn is not None
    question = f"{'Renew' if there else 'Make'} the role gpurun-terminate in account {plan.account}? [y/N]"
    if not yes and session.ask(question, flag="--yes").lower() not in ("y", "yes"):
        hint = "To create it by hand:\n" + "\n".join(admin_commands(plan.trust, plan.policy))
        raise Declined("aws.declined", "No role was created.", hint=hint)
    arn = make_role(wire, plan)
    text = f"The role {arn} {'was renewed' if there else 'was created'}.\n"
    text += "From now on, a schedule at AWS also ends each machine at its deadline."
    return Result(data={"account": plan.account, "role": arn, "made": not there}, text=text)
