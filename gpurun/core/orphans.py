"""What was found at a provider by its token: whose it is, what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpurun.core.records import Instance, Leftover

Whose = Literal["supervisor", "here", "elsewhere", "unknown"]
Fate = Literal["owned", "within lease", "no deadline", "closed here", "overdue", "destroyed", "not proven gone"]
LONGEST_LEASE_S = 26 * 3600.0
"""A name is believed up to 24 h of training and what is around it; of a longer lease its own home has the record."""


@dataclass(frozen=True)
class Owner:
    """Whose a machine is: of a run that a living supervisor of this home drives, of this home, of another, or unknown.

    `home` is the id in the token ("" where it has none), `run` the run of this home whose journal has the token.
    """

    whose: Whose
    home: str = ""
    run: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this home's."""
        return self.whose in ("supervisor", "here")


@dataclass(frozen=True)
class Orphan:
    """One instance that was found, with the deadline that counts, and what was done about it.

    `owned`: a living supervisor here drives it; `no deadline`: nobody can tell when it should end; `closed here`: its
    run here waits for it no more, as its end was believed. It `has_outlived` that where it was read alive just now.
    """

    instance: Instance
    fate: Fate
    overdue_s: float
    age_s: float | None
    owner: Owner
    has_outlived: bool = False

    @property
    def may_be_billing(self) -> bool:
        """Whether it should be gone and is not proven gone, or nobody knows until when it should live."""
        return self.fate in ("not proven gone", "no deadline", "closed here")

    @property
    def is_alarming(self) -> bool:
        """Whether it may be billing, or will until somebody ends it."""
        return self.may_be_billing or self.fate == "overdue"


@dataclass(frozen=True)
class Stray:
    """One side resource that was found, and what was done about it."""

    leftover: Leftover
    fate: Literal["owned", "kept", "removed", "not removed"]
    owner: Owner

    @property
    def is_alarming(self) -> bool:
        """Whether it is there still, though it was to be removed."""
        return self.fate == "not removed"
