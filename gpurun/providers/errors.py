"""Builds the errors for refusals by a cloud: a code, the cloud's own reason, and how to fix it.

A wrong key or a missing permission is a SetupError, too little money or quota a NoOffer, an unknown region a
UsageError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpurun.core.errors import GpurunError, NoOffer, SetupError, UsageError, did_you_mean
from gpurun.providers.base import Rejected

_MOST_NAMES = 40


class RejectedFor(Rejected):
    """The provider refused a create for a known reason. `error` is the error that the user sees."""

    def __init__(self, error: GpurunError, *, of_offer: bool = False) -> None:
        super().__init__(f"{error.what} {error.hint}", of_offer=of_offer)
        self.error = error


def not_allowed(what: str, *, hint: str) -> SetupError:
    """Return the error for a valid key without the necessary permission."""
    return SetupError("auth.not_allowed", what, hint=hint)


def bad_key(what: str, *, hint: str) -> SetupError:
    """Return the error for a key that the cloud does not accept."""
    return SetupError("auth.refused", what, hint=hint)


def not_ready(what: str, *, hint: str) -> SetupError:
    """Return the error for an account that cannot rent anything yet."""
    return SetupError("account.not_ready", what, hint=hint)


def retired_error(what: str) -> SetupError:
    """Return the error for a kind of request that the provider no longer accepts."""
    return SetupError("provider.retired", what, hint="Upgrade gpurun.")


def no_funds(what: str, *, billing_url: str) -> NoOffer:
    """Return the error for an account with too low a balance."""
    return NoOffer("account.no_funds", what, hint=f"Nothing was created; add credit at {billing_url}.")


def no_quota(what: str, *, hint: str) -> NoOffer:
    """Return the error for an account whose quota is too small."""
    return NoOffer("account.no_quota", what, hint=hint)


def no_such_region(region: str, known: Mapping[str, Sequence[str]]) -> UsageError:
    """Return the error for an unknown region. It suggests the most similar name and lists the regions of each cloud.

    `known` has the regions that this account sees, by cloud, for the clouds that answered.
    """
    typed = {name.casefold(): name for names in known.values() for name in names}
    near = did_you_mean(region.casefold(), typed, otherwise="")
    named = typed.get(near.removeprefix("Did you mean ").removesuffix("?"), "")
    listed = "; ".join(f"{cloud} has {', '.join(sorted(names)[:_MOST_NAMES])}" for cloud, names in known.items())
    what = f"There is no region {region!r} at {' or '.join(known)} that this account may use."
    return UsageError("region.unknown", what, hint=f"Did you mean {named}? {listed}." if named else f"{listed}.")
