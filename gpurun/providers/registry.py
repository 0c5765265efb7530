"""Which providers there are, by name; each is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from gpurun.core.clock import Clock
from gpurun.core.errors import UsageError
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
        near = get_close_matches(name, PROVIDERS, n=1)
        raise UsageError(
            "provider.unknown",
            f"This gpurun has no provider {name!r}.",
            hint=f"Did you mean --provider {near[0]}?" if near else f"It has: {', '.join(PROVIDERS)}.",
        )
    return PROVIDERS[name](home, clock)
