"""What RunPod's answers mean: which certainly made nothing, which leave a doubt, which concern the key."""

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
"""How far three roundings to single precision move a price, relative to it: one GPU's, the product, its digits."""
_MOST_PLACES = 6


def describe_runpod_error(answer: Answer) -> str:
    """Return the reason that an error gives, on one line of limited length."""
    payload = answer.json
    if not isinstance(payload, dict):
        return f"HTTP {answer.status} without a reason"
    listed = payload.get("errors")
    parts = [payload.get("detail") or payload.get("title"), *(listed if isinstance(listed, list) else [])]
    words = plain(" · ".join(str(part) for part in parts if part))
    return f"HTTP {answer.status}: {words}" if words else f"HTTP {answer.status} without a reason"


def plain(said: str) -> str:
    """Return a server's words on one line of limited length, without a key that they repeat from the request."""
    return _KEY_LIKE.sub("•••", answer_words(said))[:500]


def judge_create_answer(answer: Answer) -> NoCapacity | Rejected | Unknown:
    """Return what a create's answer without a pod says about whether there is one.

    400 and 403 may concern this GPU, data centre or pool alone: RunPod says to continue with the next candidate.
    """
    words = describe_runpod_error(answer)
    if answer.status in (400, 403) and is_sold_out(words):
        return NoCapacity(words)
    if answer.status == 500 and _NO_FUNDS.search(words):  # RunPod's answer if the balance is too low.
        return _penniless(words)
    match answer.status:
        case 401:
            return RejectedFor(bad_key(f"RunPod refuses the key ({words}).", hint=_ANOTHER_KEY))
        case 403:
            what = f"This key may not create pods at RunPod, or not of this kind ({words})."
            refused = not_allowed(what, hint=_ANOTHER_KEY)
            return RejectedFor(refused, of_offer=True)
        case 402:
            return _penniless(words)
        case 410:
            return RejectedFor(retired(f"RunPod no longer supports this kind of request ({words})."))
        case 400:
            return Rejected(words, of_offer=True)
        case 404 | 405 | 406 | 413 | 415 | 422:
            return Rejected(words)
    return Unknown(words)


def refusal_in_words(words: str) -> NoCapacity | Rejected | Unknown:
    """Return the same for GraphQL, which has no status: only what certainly made nothing counts as that."""
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
    """Return whether a refusal is about capacity; there is no code for that, only sentences."""
    return any(sign in words.lower() for sign in _SOLD_OUT)


def explain_runpod_answer(answer: Answer) -> SetupError | Unknown:
    """Return the error for an unexpected answer to anything but a create."""
    words = describe_runpod_error(answer)
    if answer.status == 401:
        return bad_key(f"RunPod refuses the key ({words}).", hint=_ANOTHER_KEY)
    if answer.status == 403:
        return not_allowed(f"RunPod does not allow this request with this key ({words}).", hint=_ANOTHER_KEY)
    if answer.status == 410:
        return retired(f"RunPod no longer supports this kind of request ({words}).")
    return Unknown(f"RunPod gave no clear answer ({words})")


def money(value: object) -> Micros | None:
    """Return an amount of dollars as RunPod writes it, rounded up; None if it is not an amount.

    Its figures pass through floats (14.320000000000002): a difference of less than a micro-dollar from seven digits is
    such noise.
    """
    amount = _number(value)
    if amount is None:
        return None
    plain = Precision(prec=7).plus(amount)
    return usd(plain if abs(plain - amount) < _NOISE_USD else amount)


def rate(value: object) -> Micros | None:
    """Return an hourly rate; None if there is none, or if it is zero: a pod that does not run, a free GPU.

    RunPod's prices are floats of single precision, in which 36.72 may come as 36.720001220703125. So the shortest
    decimal that can have become this number is read; the error is below two ten-millionths of a price.
    """
    amount = _number(value)
    if amount is None or amount <= 0:
        return None
    for places in range(_MOST_PLACES + 1):
        short = amount.quantize(Decimal(1).scaleb(-places))
        if abs(short - amount) <= amount * _SINGLE_NOISE:
            return usd(short)
    return usd(amount)


def _number(value: object) -> Decimal | None:
    """Return a figure that can be an amount of dollars; the JSON is read with decimals, never with floats."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return None
    amount = Decimal(value)
    return amount if amount.is_finite() and amount.adjusted() <= _MOST_DIGITS else None
