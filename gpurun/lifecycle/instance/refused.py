"""A create that certainly made nothing: whether another approved offer may be tried, and else what the user is told."""

from __future__ import annotations

from gpurun.core.errors import GpurunError, NoOffer
from gpurun.core.model import Offer
from gpurun.core.progress import PASSES_OVER, Event
from gpurun.ledger.journal import read_journal
from gpurun.lifecycle.context import Context
from gpurun.providers.base import NoCapacity, Rejected
from gpurun.providers.refusals import RejectedFor

_MOST_TOLD = 3


def reason_of(refusal: NoCapacity | Rejected) -> str:
    """The journal's word for why nothing was made."""
    if isinstance(refusal, NoCapacity):
        return "no_capacity"
    return "offer_rejected" if refusal.of_offer else "rejected"


def last_word(refusal: NoCapacity | Rejected, context: Context) -> GpurunError:
    """The error that ends the run: the last refusal's own, and what was said of the offers that were tried before."""
    before = _before(str(refusal), context)
    if isinstance(refusal, RejectedFor):
        error = refusal.error
        return type(error)(error.code, error.what + before, hint=error.hint)
    code = "create.no_capacity" if isinstance(refusal, NoCapacity) else "create.rejected"
    return NoOffer(
        code,
        f"{context.provider.name} refused to make the instance: {str(refusal).rstrip('.')}.{before}",
        hint="Nothing was made and nothing is billed. Try another --provider or --gpu.",
    )


def _before(last: str, context: Context) -> str:
    """What the journal has of earlier offers, each reason once; nothing where all were refused in the same words."""
    told: dict[str, str] = {}
    name = ""
    for record in read_journal(context.folder.journal).records:
        if record.event is Event.CREATE_INTENDED:
            offer = Offer.model_validate(record.data["offer"])
            name = f"{offer.provider} {offer.label} {offer.place}"
        elif record.event is Event.CREATE_REFUSED and record.data["reason"] in PASSES_OVER:
            told.setdefault(str(record.data["message"]).rstrip("."), name)
    told.pop(last.rstrip("."), None)
    shown = [f"{name}: {message}" for message, name in told.items()][:_MOST_TOLD]
    return f" Before that, {'; '.join(shown)}." if shown else ""
