"""What clouds refuse, in one set of words: a code, the cloud's own reason, and exactly what would fix it.

A key or a permission is a SetupError, money and quota are a NoOffer, a region that does not exist is a UsageError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpurun.core.errors import GpurunError, NoOffer, SetupError, UsageError, did_you_mean
from gpurun.providers.base import Rejected

_MOST_NAMES = 40


class RejectedFor(Rejected):
    """A create that was refused for a known reason: `error` is what the user sees."""

    def __init__(self, error: GpurunError, *, of_offer: bool = False) -> None:
        super().__init__(f"{error.what} {error.hint}", of_offer=of_offer)
        self.error = error


def not_allowed(what: str, *, hint: str) -> SetupError:
    """Return the error for a valid key that may not do this."""
    return SetupError("auth.not_allowed", what, hint=hint)


def bad_key(what: str, *, hint: str) -> SetupError:
    """Return the error for a key that is not accepted."""
    return SetupError("auth.refused", what, hint=hint)


def not_ready(what: str, *, hint: str) -> SetupError:
    """Return the error for an account that may not rent anything yet."""
    return SetupError("account.not_ready", what, hint=hint)


def retired(what: str) -> SetupError:
    """Return the error for a kind of request that the provider no longer accepts."""
    return SetupError("provider.retired", what, hint="Upgrade gpurun.")


def no_funds(what: str, *, billing_url: str) -> NoOffer:
    """Return the error for an account that cannot pay for it."""
    return NoOffer("account.no_funds", what, hint=f"Nothing was made; add credit at {billing_url}.")


def no_quota(what: str, *, hint: str) -> NoOffer:
    """Return the error for an account whose quota is too small."""
    return NoOffer("account.no_quota", what, hint=hint)


def no_such_region(region: str, known: Mapping[str, Sequence[str]]) -> UsageError:
    """Return the error for a region that none of these clouds has: the nearest of their names, and all of them.

    `known` are the regions of each cloud that answered, as this account sees them.
    """
    typed = {name.casefold(): name for names in known.values() for name in names}
    near = did_you_mean(region.casefold(), typed, otherwise="")
    named = typed.get(near.removeprefix("Did you mean ").removesuffix("?"), "")
    listed = "; ".join(f"{cloud} has {', '.join(sorted(names)[:_MOST_NAMES])}" for cloud, names in known.items())
    what = f"There is no region {region!r} at {' or '.join(known)} that this account may use."
    return UsageError("region.unknown", what, hint=f"Did you mean {named}? {listed}." if named else f"{listed}.")
