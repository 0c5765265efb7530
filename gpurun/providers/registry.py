"""Which providers there are, by name; each is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from gpurun.core.clock import Clock
from gpurun.core.errors import UsageError, did_you_mean
from gpurun.core.paths import Home
from gpurun.providers.base import Provider


def _local(home: Home, clock: Clock) -> Provider:
    from gpurun.providers.local import LocalProvider

    return LocalProvider(home, clock)


PROVIDERS: dict[str, Callable[[Home, Clock], Provider]] = {
    "local": _local,
}


def open_provider(name: str, home: Home, clock: Clock) -> Provider:
    """The provider of that name; an unknown name is a UsageError that tells the nearest."""
    if name not in PROVIDERS:
        hint = did_you_mean(name, PROVIDERS, otherwise=f"It has: {', '.join(PROVIDERS)}.")
        raise UsageError("provider.unknown", f"This gpurun has no provider {name!r}.", hint=hint)
    return PROVIDERS[name](home, clock)
