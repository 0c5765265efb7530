"""Says in a sentence what bounds the cost of a run, and whether its provider's bill was read."""

from __future__ import annotations

from collections.abc import Sequence

from gpurun.ledger.billed_time import BY_BILL, BY_TIMER, MEASURED, REPORTED, UNSEEN
from gpurun.ledger.rental import Rental, is_more

_BOUNDS = {
    MEASURED: "the machine was watched until its provider showed it as gone",
    REPORTED: "by the provider's own times of its beginning and its end",
    BY_BILL: "by the provider's bill, which two readings gave alike; when it ended was not seen",
    BY_TIMER: "at most, by the time limit at which its provider ends it; when it ended was not seen",
    UNSEEN: "at most, up to the first reading that showed it as gone; when it ended was not seen",
    None: "up to the proof that it is gone",
}
_EXTRA = "at most, with a second machine from its request on"
_UNREAD = "the provider's bill was not read"


def cost_says(rentals: Sequence[Rental]) -> str:
    """Return the sentence for these rentals."""
    rented = [one for one in rentals if one.end != "refused"]
    if not rented:
        return "nothing was rented"
    if is_more(rentals):
        return f"unknown: more was billed than is on record; {_UNREAD}"
    if not all(one.ended for one in rented):
        return f"unknown: a machine is not proven gone; {_UNREAD}"
    paid = [one for one in rented if one.rate or one.extras]
    if not paid:
        return "nothing is charged for it"
    parts = [_EXTRA for one in paid if one.extras] + [_BOUNDS[one.end_is] for one in paid]
    parts.sort(key=lambda words: not words.startswith("at most"))
    parts += [_UNREAD] if any(one.billed is None for one in paid) else []
    return "; ".join(dict.fromkeys(parts))
