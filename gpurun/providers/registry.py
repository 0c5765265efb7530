"""Opens providers by name. Each is imported only when it is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gpurun.core.credentials import aws_source, find_credential, require_credential
from gpurun.core.errors import SetupError, UsageError, did_you_mean
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices

if TYPE_CHECKING:
    from gpurun.core.clock import Clock
    from gpurun.core.cluster import Cluster, LoginNode
    from gpurun.providers.base import Provider

    LogIn = Callable[[Cluster, Home, Clock], LoginNode]


def _open_local(home: Home, clock: Clock, choices: Choices) -> Provider:
    from gpurun.providers.local import LocalProvider

    return LocalProvider(home, clock)


def _open_ssh(home: Home, clock: Clock, choices: Choices) -> Provider:
    from gpurun.providers.ssh import SshProvider

    return SshProvider(home, clock)


def _open_runpod(home: Home, clock: Clock, choices: Choices) -> Provider:
    from gpurun.providers.runpod.provider import URL, RunPodProvider

    key = require_credential("runpod", home).secret
    base_url = os.environ.get(OVERRIDES["runpod"]) or URL
    return RunPodProvider(key, clock, base_url=base_url, spot=choices.spot, region=choices.region)


def _open_lambda(home: Home, clock: Clock, choices: Choices) -> Provider:
    from gpurun.providers.lambdalabs.provider import URL, LambdaProvider

    key = require_credential("lambda", home).secret
    base_url = os.environ.get(OVERRIDES["lambda"]) or URL
    guard = (find_credential("lambda-guard", home) or require_credential("lambda", home)) if choices.guard else None
    guard_key = guard.secret if guard else None
    return LambdaProvider(key, clock, base_url=base_url, guard_key=guard_key, turns=home.turns)


def _open_aws(home: Home, clock: Clock, choices: Choices) -> Provider:
    from gpurun.providers.aws import AwsProvider

    return AwsProvider(clock, region=choices.region, spot=choices.spot)


def _open_slurm(home: Home, clock: Clock, choices: Choices, login: LogIn) -> Provider:
    """Open the chosen cluster or, if none was chosen, all clusters, because a run may be on any of them.

    Clusters with a faulty table are left out, and the provider reports that they were not queried.
    """
    from gpurun.core.cluster import with_flags
    from gpurun.core.settings import find_cluster, load_clusters
    from gpurun.providers.slurm.provider import Site, SlurmProvider

    broken = dict[str, UsageError]()
    chosen = [] if choices.region else list(load_clusters(home, broken).values())
    if not chosen:
        try:
            cluster = find_cluster(home, choices.region)
        except UsageError as fault:
            raise SetupError(fault.code, fault.what, hint=fault.hint) from fault
        chosen = [with_flags(cluster, **choices.of_cluster)]
    sites = [Site(cluster, login(cluster, home, clock)) for cluster in chosen]
    return SlurmProvider(sites, clock, faults=[fault.what.rstrip(".") for fault in broken.values()])


PROVIDERS: dict[str, Callable[..., Provider]] = {
    "runpod": _open_runpod,
    "lambda": _open_lambda,
    "aws": _open_aws,
    "slurm": _open_slurm,
    "ssh": _open_ssh,
    "local": _open_local,
}

CLOUDS = ("runpod", "lambda", "aws")
"""The providers that need a key and bill for their machines."""

OVERRIDES = {"runpod": "RUNPOD_API_BASE_URL", "lambda": "LAMBDA_API_BASE_URL"}
"""The environment variables that send a provider's requests, and so the key, to another address."""


def require_known(names: Iterable[str]) -> None:
    """Raise a UsageError for an unknown name. It suggests the most similar known name."""
    for name in names:
        if name not in PROVIDERS:
            hint = did_you_mean(name, PROVIDERS, otherwise=f"It has: {', '.join(PROVIDERS)}.")
            raise UsageError("provider.unknown", f"This gpurun has no provider {name!r}.", hint=hint)


def demand_keys(names: Iterable[str], home: Home) -> None:
    """Raise a SetupError for the first of these clouds without a key. AWS's SDK finds its own credentials."""
    for name in names:
        if name != "aws":
            require_credential(name, home)


def key_source(name: str, home: Home) -> str | None:
    """Return the source of a cloud's key, None if there is no key; SetupError if the key cannot be read."""
    if name == "aws":
        return aws_source()
    found = find_credential(name, home)
    return found.source if found else None


def ready_providers(home: Home) -> list[str]:
    """Return the clouds for which a key is found."""
    return [name for name in CLOUDS if key_source(name, home)]


def known_here(home: Home) -> list[str]:
    """Return the default providers: clouds for which a key is found, the clusters of config.toml, and this machine.

    The user's own boxes are not included, because gpurun keeps no list of them.
    """
    from gpurun.core.settings import load_clusters

    broken = dict[str, UsageError]()
    return [*ready_providers(home), *(["slurm"] if load_clusters(home, broken) or broken else []), "local"]


def open_provider(
    name: str, home: Home, clock: Clock, choices: Choices | None = None, *, login: LogIn | None = None
) -> Provider:
    """Return the provider with this name; UsageError for an unknown name, SetupError if its key is missing.

    `slurm:CLUSTER` opens only this cluster. `login` connects to a cluster's login node; `slurm` needs it.
    """
    name, _, cluster = name.partition(":")
    require_known([name])
    way, choices = {"login": login} if name == "slurm" else {}, choices or Choices()
    return PROVIDERS[name](home, clock, choices.model_copy(update={"region": cluster}) if cluster else choices, **way)
