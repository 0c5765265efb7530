"""Profiles of the real providers, as far as their behaviour can lose money; docs/PROVIDERS.md has the facts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gpurun.core.records import Teardown
from gpurun.providers.base import Traits

_SETTLE_S = 120.0


@dataclass(frozen=True)
class Profile:
    """How one provider behaves in time and money.

    `hidden_s`: how long every verb denies a new machine.
    `list_lag_s`: how far the list lags behind births and deaths.
    `tomb_s`: how long the list shows dead machines as such.
    `dying_s`: how long a termination takes.
    `late_s`: how long a late request takes to arrive; its sender gives up after `timeout_s`.
    `stale_s`: how old a stale answer is.
    `least_billed_s`: the shortest time that is billed for a machine.
    `leaves`: the kinds of side resources that a token leaves.
    `tells_rate`: answers have the price per hour.
    `tells_end`: answers have the time at which billing ended.
    `bill_lag_s`: how far the bill of a machine lags behind; None if the provider has no such bill.
    `timer`: "boot" if the machine arms its dead-man timer when it boots.
    `timer_needs_api`: the timer ends the machine through the API.
    """

    name: str
    traits: Traits
    idempotent: bool
    timer: Literal["boot", "none"]
    tells_rate: bool
    timer_needs_api: bool = False
    boot_s: float = 40.0
    hidden_s: float = 0.0
    list_lag_s: float = 0.0
    tomb_s: float = 0.0
    dying_s: float = 0.0
    late_s: float = 60.0
    stale_s: float = 20.0
    timeout_s: float = 30.0
    billing_unit_s: int = 1
    least_billed_s: int = 0
    leaves: tuple[str, ...] = ()
    tells_end: bool = False
    bill_lag_s: float | None = None


def _traits(console_url: str) -> Traits:
    return Traits(_SETTLE_S, 5.0, 3, 30.0, Teardown.DESTROYED, console_url)


RUNPOD = Profile(
    name="runpod",
    traits=_traits("https://console.runpod.io/pods"),
    idempotent=False,
    timer="boot",
    timer_needs_api=True,
    tells_rate=True,
    bill_lag_s=240.0,
    list_lag_s=10.0,
    dying_s=3.0,
)
LAMBDA = Profile(
    name="lambda",
    traits=_traits("https://cloud.lambda.ai/instances"),
    idempotent=False,
    timer="none",
    tells_rate=True,
    list_lag_s=15.0,
    dying_s=20.0,
    billing_unit_s=60,
    leaves=("ssh_key",),
)
LAMBDA_GUARDED = replace(LAMBDA, timer="boot", timer_needs_api=True)
AWS = Profile(
    name="aws",
    traits=_traits("https://console.aws.amazon.com/ec2/home#Instances:"),
    idempotent=True,
    timer="boot",
    tells_rate=False,
    tells_end=True,
    hidden_s=3.0,
    list_lag_s=5.0,
    tomb_s=3600.0,
    dying_s=25.0,
    least_billed_s=60,
    leaves=("security_group",),
)
HOSTILE = Profile(
    name="hostile",
    traits=_traits("https://console.example"),
    idempotent=False,
    timer="boot",
    timer_needs_api=True,
    tells_rate=True,
    hidden_s=40.0,
    list_lag_s=25.0,
    dying_s=30.0,
    late_s=40.0,
    billing_unit_s=60,
    least_billed_s=60,
    leaves=("ssh_key", "firewall"),
)

PROFILES: dict[str, Profile] = {
    "runpod": RUNPOD, "lambda": LAMBDA, "lambda-guarded": LAMBDA_GUARDED, "aws": AWS, "hostile": HOSTILE,
}  # fmt: skip
