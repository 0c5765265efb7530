"""What RunPod's answers mean: which certainly made nothing, which leave a doubt, which are about the key."""

from __future__ import annotations

import re
from decimal import Context as Precision
from decimal import Decimal

from gpurun.core.errors import SetupError
from gpurun.core.money import Micros, usd
from gpurun.core.untrusted import answer_words
from gpurun.providers._http import Answer
from gpurun.providers.base import NoCapacity, Rejected, Unknown
from gpurun.providers.errors import RejectedFor, bad_key, no_funds, not_allowed, retired

_SOLD_OUT = (
    "no longer any instances",
    "does not have the resources",
    "no instances available",
    "no instances currently available",
    "could not find any pods with required specifications",
    "no available datacenter with requested resources",
)
_NO_FUNDS = re.compile(r"\b(balance|funds)\b|at least \$", re.IGNORECASE)
_BILLING_URL = "https://console.runpod.io/user/billing"
_ANOTHER_KEY = "Give a key with full access to pods: gpurun auth set runpod."
_KEY_LIKE = re.compile(r"[A-Za-z0-9+/=_]{40,}")
_MOST_DIGITS = 7
_NOISE_USD = Decimal("0.000001")
_SINGLE_NOISE = 3 * Decimal(2) ** -24
"""How far three roundings to single precision move a price, relative to it: of one GPU's, the product, its digits."""
_MOST_PLACES = 6


def describe_runpod_error(answer: Answer) -> str:
    """The reason that an error gives, on one line of moderate length."""
    told = answer.json
    if not isinstance(told, dict):
        return f"HTTP {answer.status} without a reason"
    listed = told.get("errors")
    parts = [told.get("detail") or told.get("title"), *(listed if isinstance(listed, list) else [])]
    said = plain(" · ".join(str(part) for part in parts if part))
    return f"HTTP {answer.status}: {said}" if said else f"HTTP {answer.status} without a reason"


def plain(said: str) -> str:
    """A server's words on one line of moderate length; a key that it repeats from the request is left out."""
    return _KEY_LIKE.sub("•••", answer_words(said))[:500]


def judge_create_answer(answer: Answer) -> NoCapacity | Rejected | Unknown:
    """What an answer to a create that is not a pod says about whether there is one.

    400 and 403 may be about this GPU, data centre or pool alone: RunPod says to go on to the next candidate.
    """
    words = describe_runpod_error(answer)
    if answer.status in (400, 403) and is_sold_out(words):
        return NoCapacity(words)
    if answer.status == 500 and _NO_FUNDS.search(words):  # So it says that the balance does not pay for this.
        return _penniless(words)
    match answer.status:
        case 401:
            return RejectedFor(bad_key(f"RunPod refuses the key ({words}).", hint=_ANOTHER_KEY))
        case 403:
            what = f"This key may not create pods at RunPod, or none of this kind ({words})."
            refused = not_allowed(what, hint=_ANOTHER_KEY)
            return RejectedFor(refused, of_offer=True)
        case 402:
            return _penniless(words)
        case 410:
            return RejectedFor(retired(f"RunPod retired this way of asking ({words})."))
        case 400:
            return Rejected(words, of_offer=True)
        case 404 | 405 | 406 | 413 | 415 | 422:
            return Rejected(words)
    return Unknown(words)


def refusal_in_words(words: str) -> NoCapacity | Rejected | Unknown:
    """The same for GraphQL, which has no status: only what certainly made nothing is called so."""
    if is_sold_out(words):
        return NoCapacity(words)
    if _NO_FUNDS.search(words):
        return _penniless(words)
    if any(sign in words for sign in ("Syntax Error", "Cannot query", "is not defined by type", "was not provided")):
        return Rejected(words, of_offer=True)
    return Unknown(words)


def _penniless(words: str) -> RejectedFor:
    what = f"The balance at RunPod does not pay for an hour of this ({words})."
    return RejectedFor(no_funds(what, billing_url=_BILLING_URL))


def is_sold_out(words: str) -> bool:
    """Whether a refusal is about capacity; there is no code for that, only sentences."""
    return any(sign in words.lower() for sign in _SOLD_OUT)


def explain_runpod_answer(answer: Answer) -> SetupError | Unknown:
    """What an unexpected answer to anything but a create is."""
    words = describe_runpod_error(answer)
    if answer.status == 401:
        return bad_key(f"RunPod refuses the key ({words}).", hint=_ANOTHER_KEY)
    if answer.status == 403:
        return not_allowed(f"RunPod does not let this key do what was asked for ({words}).", hint=_ANOTHER_KEY)
    if answer.status == 410:
        return retired(f"RunPod retired this way of asking ({words}).")
    return Unknown(f"RunPod gave no clear answer ({words})")


def money(told: object) -> Micros | None:
    """An amount of dollars as RunPod writes it, rounded up; None when it is none.

    Its figures pass through floats (14.320000000000002): what differs from seven digits by less than a micro-dollar is
    such noise.
    """
    amount = _number(told)
    if amount is None:
        return None
    plain = Precision(prec=7).plus(amount)
    return usd(plain if abs(plain - amount) < _NOISE_USD else amount)


def rate(told: object) -> Micros | None:
    """An hourly rate; None when there is none, which is also what a zero says: a pod that does not run, a free GPU.

    RunPod's prices are floats of single precision, in which 36.72 may come as 36.720001220703125. So the shortest
    decimal that can have become this number is read; what that can give away is below two ten-millionths of a price.
    """
    amount = _number(told)
    if amount is None or amount <= 0:
        return None
    for places in range(_MOST_PLACES + 1):
        short = amount.quantize(Decimal(1).scaleb(-places))
        if abs(short - amount) <= amount * _SINGLE_NOISE:
            return usd(short)
    return usd(amount)


def _number(told: object) -> Decimal | None:
    """A figure that can be an amount of dollars; the JSON is read with decimals, never with floats."""
    if isinstance(told, bool) or not isinstance(told, int | Decimal):
        return None
    amount = Decimal(told)
    return amount if amount.is_finite() and amount.adjusted() <= _MOST_DIGITS else None
