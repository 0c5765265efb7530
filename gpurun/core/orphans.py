"""Machines that were found at a provider by their tokens: who owns them, and what happened to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpurun.core.records import Instance, Leftover

Whose = Literal["supervisor", "here", "elsewhere", "unknown"]
Fate = Literal["owned", "within lease", "no deadline", "closed here", "overdue", "destroyed", "not proven gone"]
LONGEST_LEASE_S = 26 * 3600.0
"""A deadline in a token is trusted up to 24 h of training plus overhead; a longer lease is recorded in its own home."""


@dataclass(frozen=True)
class Owner:
    """Who owns a machine: a run with a living supervisor in this home, this home, another home, or unknown.

    `home` is the id in the token ("" if it has none), `run` the run of this home whose journal has the token.
    """

    whose: Whose
    home: str = ""
    run: str | None = None

    @property
    def is_here(self) -> bool:
        """Return whether the machine belongs to this home."""
        return self.whose in ("supervisor", "here")


@dataclass(frozen=True)
class Orphan:
    """One instance that was found, with the deadline that counts, and what was done about it.

    `owned`: a living supervisor here drives it. `no deadline`: its deadline is unknown. `closed here`: its run in this
    home no longer waits for it, because its end was believed. It `has_outlived` that if it was just read as alive.
    """

    instance: Instance
    fate: Fate
    overdue_s: float
    age_s: float | None
    owner: Owner
    has_outlived: bool = False

    @property
    def may_be_billing(self) -> bool:
        """Return whether it should be gone and is not proven gone, or its deadline is unknown."""
        return self.fate in ("not proven gone", "no deadline", "closed here")

    @property
    def is_alarming(self) -> bool:
        """Return whether it may be billing, or will be until someone ends it."""
        return self.may_be_billing or self.fate == "overdue"


@dataclass(frozen=True)
class Stray:
    """A side resource, such as a firewall group, that was left without its machine, and what was done about it."""

    leftover: Leftover
    fate: Literal["owned", "kept", "removed", "not removed"]
    owner: Owner

    @property
    def is_alarming(self) -> bool:
        """Return whether it still exists although it should have been removed."""
        return self.fate == "not removed"
