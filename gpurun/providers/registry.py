"""Which providers there are, by name; each is imported only when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gpurun.core.credentials import aws_source, find_credential, require_credential
from gpurun.core.errors import UsageError, did_you_mean
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices

if TYPE_CHECKING:
    from gpurun.core.clock import Clock
    from gpurun.providers.base import Provider


def _local(home: Home, clock: Clock, choices: Choices) -> Provider:
    from gpurun.providers.local import LocalProvider

    return LocalProvider(home, clock)


def _ssh(home: Home, clock: Clock, choices: Choices) -> Provider:
    from gpurun.providers.ssh import SshProvider

    return SshProvider(home, clock)


def _runpod(home: Home, clock: Clock, choices: Choices) -> Provider:
    from gpurun.providers.runpod.provider import URL, RunPodProvider

    key = require_credential("runpod", home).secret
    base_url = os.environ.get(OVERRIDES["runpod"]) or URL
    return RunPodProvider(key, clock, base_url=base_url, spot=choices.spot, region=choices.region)


def _lambda(home: Home, clock: Clock, choices: Choices) -> Provider:
    from gpurun.providers.lambdalabs.provider import URL, LambdaProvider

    key = require_credential("lambda", home).secret
    base_url = os.environ.get(OVERRIDES["lambda"]) or URL
    guard = (find_credential("lambda-guard", home) or require_credential("lambda", home)) if choices.guard else None
    guard_key = guard.secret if guard else None
    return LambdaProvider(key, clock, base_url=base_url, guard_key=guard_key, turns=home.turns)


def _aws(home: Home, clock: Clock, choices: Choices) -> Provider:
    from gpurun.providers.aws import AwsProvider

    return AwsProvider(clock, region=choices.region, spot=choices.spot)


PROVIDERS: dict[str, Callable[[Home, Clock, Choices], Provider]] = {
    "runpod": _runpod,
    "lambda": _lambda,
    "aws": _aws,
    "ssh": _ssh,
    "local": _local,
}

CLOUDS = ("runpod", "lambda", "aws")
"""The providers that rent out machines for money, under a key."""

OVERRIDES = {"runpod": "RUNPOD_API_BASE_URL", "lambda": "LAMBDA_API_BASE_URL"}
"""The variables that send a provider's requests, and so its key, elsewhere."""


def require_known(names: Iterable[str]) -> None:
    """Refuse a name that no provider has: a UsageError that tells the nearest."""
    for name in names:
        if name not in PROVIDERS:
            hint = did_you_mean(name, PROVIDERS, otherwise=f"It has: {', '.join(PROVIDERS)}.")
            raise UsageError("provider.unknown", f"This gpurun has no provider {name!r}.", hint=hint)


def ready_providers(home: Home) -> list[str]:
    """The clouds that there is a key for."""
    return [name for name in CLOUDS if (aws_source() if name == "aws" else find_credential(name, home))]


def open_provider(name: str, home: Home, clock: Clock, choices: Choices | None = None) -> Provider:
    """The provider of that name; UsageError for an unknown name, SetupError for one without a key."""
    require_known([name])
    return PROVIDERS[name](home, clock, choices or Choices())
