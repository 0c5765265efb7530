"""The contents of the simulated cloud: boxes, side resources, and the faults that a call can have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpurun.core.errors import SetupError
from gpurun.core.money import Micros
from gpurun.core.records import Leftover, Order


class Fault(StrEnum):
    """A fault of one call.

    The first group (except NONE, which is no fault) prevents or delays the effect of the call. With the second group,
    the answer or the effect is wrong.
    """

    NONE = "made"
    DROPPED = "dropped"
    BUSY = "429 for too long"
    REVOKED = "key revoked"
    FULL = "no capacity"
    REFUSED = "rejected"
    LATE = "made long after the sender gave up"
    DEAF = "ok, and nothing done"

    LOST = "made, answer lost"
    BROKEN = "made, answer broken"
    REVOKED_AFTER = "made, key revoked"
    OF_ANOTHER = "made, answer of another"
    TWICE = "made twice"
    DEARER = "made, but dearer"
    OTHER_GPU = "made, with another GPU"
    NO_TIMER = "made, but its timer never fires"
    STILLBORN = "made, and ended as it was launched"
    NOWHERE = "told the id of a machine that there never is"
    STALE = "answered from an old view"
    DENIED = "says that there is nothing"


@dataclass
class Box:
    """A machine that really exists; times are true seconds. `ends_s` is when its timer fires; None: it is not armed."""

    id: str
    order: Order
    rate: Micros
    born_s: float
    up_s: float
    gpu: str
    gpu_count: int
    works: bool = True
    ends_s: float | None = None
    asked_s: float | None = None
    died_s: float | None = None
    answered: bool = False
    """Whether it has answered its user."""


@dataclass
class Thing:
    """A side resource that really exists until it is removed."""

    leftover: Leftover
    made_s: float
    removed_s: float | None = None


def thing_of(provider: str, kind: str, order: Order, made_s: float) -> Thing:
    """Return the side resource of this kind that an order leaves behind; there is one for each token."""
    leftover = Leftover(
        provider=provider,
        kind=kind,
        id=f"{kind}-{order.token}",
        run=order.run,
        token=order.token,
        deadline_wall=order.deadline_wall,
    )
    return Thing(leftover, made_s)


def revoked() -> SetupError:
    """Return the error that a caller gets once its key is revoked."""
    return SetupError("key.revoked", "The key is not accepted any more.", hint="Make a new one.")
