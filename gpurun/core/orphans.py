"""Machines that were found at a provider by their tokens: who owns them, and what happened to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpurun.core.records import Instance, Leftover

Whose = Literal["supervisor", "here", "elsewhere", "unknown"]
Fate = Literal["owned", "within lease", "no deadline", "closed here", "overdue", "destroyed", "not proven gone"]
LONGEST_LEASE_S = 26 * 3600.0
"""The longest lease that is believed from a token alone: 24 h of training plus overhead.

The deadline of a longer lease is in the journal of the home that made the token.
"""


@dataclass(frozen=True)
class Owner:
    """The owner of a machine. `whose` is "supervisor" for a run of this home that a supervisor drives now.

    Otherwise it is "here" (this home), "elsewhere" (another home) or "unknown". `home` is the id in the token ("" if it
    has none), `run` the run of this home whose journal contains the token.
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
    """One instance that was found at a provider, with the deadline that counts, and what was done about it.

    `fate` is "owned" if a supervisor of this home drives the instance, "no deadline" if its deadline is unknown, and
    "closed here" if a journal of this home records its end, so that no run waits for it any more. `has_outlived` means
    that its end is recorded, but that it was just read as alive.
    """

    instance: Instance
    fate: Fate
    overdue_s: float
    age_s: float | None
    owner: Owner
    has_outlived: bool = False

    @property
    def may_be_billing(self) -> bool:
        """Return whether its end was requested or recorded but is not proven, or its deadline is unknown."""
        return self.fate in ("not proven gone", "no deadline", "closed here")

    @property
    def is_alarming(self) -> bool:
        """Return whether it may be billing, or is past its deadline and was not ended."""
        return self.may_be_billing or self.fate == "overdue"


@dataclass(frozen=True)
class Stray:
    """A side resource of a machine, such as a firewall group, that was found, and what was done about it."""

    leftover: Leftover
    fate: Literal["owned", "kept", "removed", "not removed"]
    owner: Owner

    @property
    def is_alarming(self) -> bool:
        """Return whether it still exists although it should have been removed."""
        return self.fate == "not removed"
