"""Interprets RunPod's answers: whether a pod may exist, whether the key is the reason, and how much an amount is."""

from __future__ import annotations

import re
from decimal import Context as Precision
from decimal import Decimal

from gpurun.core.errors import SetupError
from gpurun.core.money import Micros, usd
from gpurun.core.untrusted import answer_words
from gpurun.providers._http import Answer
from gpurun.providers.base import NoCapacity, Rejected, Unknown
from gpurun.providers.errors import RejectedFor, bad_key, no_funds, not_allowed, retired_error

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
"""The relative error of a price after three roundings to single precision: per GPU, in the product, in its digits."""
_MOST_PLACES = 6


def describe_runpod_error(answer: Answer) -> str:
    """Return status and reason of an error, on one line of limited length."""
    payload = answer.json
    if not isinstance(payload, dict):
        return f"HTTP {answer.status} without a reason"
    listed = payload.get("errors")
    parts = [payload.get("detail") or payload.get("title"), *(listed if isinstance(listed, list) else [])]
    words = plain(" · ".join(str(part) for part in parts if part))
    return f"HTTP {answer.status}: {words}" if words else f"HTTP {answer.status} without a reason"


def plain(message: str) -> str:
    """Return a server's message on one line of limited length. A key that it repeats from the request is removed."""
    return _KEY_LIKE.sub("•••", answer_words(message))[:500]


def judge_create_answer(answer: Answer) -> NoCapacity | Rejected | Unknown:
    """Return the error for a create that returned no pod; Unknown if there may be a pod nevertheless.

    400 and 403 may concern only this GPU, data centre or pool: RunPod's advice is to try the next candidate.
    """
    words = describe_runpod_error(answer)
    if answer.status in (400, 403) and is_sold_out(words):
        return NoCapacity(words)
    if answer.status == 500 and _NO_FUNDS.search(words):  # RunPod's answer if the balance is too low.
        return _refuse_balance(words)
    match answer.status:
        case 401:
            return RejectedFor(bad_key(f"RunPod refuses the key ({words}).", hint=_ANOTHER_KEY))
        case 403:
            what = f"RunPod does not allow this key to create pods, or this kind of pod ({words})."
            refused = not_allowed(what, hint=_ANOTHER_KEY)
            return RejectedFor(refused, of_offer=True)
        case 402:
            return _refuse_balance(words)
        case 410:
            return RejectedFor(retired_error(f"RunPod no longer supports this kind of request ({words})."))
        case 400:
            return Rejected(words, of_offer=True)
        case 404 | 405 | 406 | 413 | 415 | 422:
            return Rejected(words)
    return Unknown(words)


def refusal_in_words(words: str) -> NoCapacity | Rejected | Unknown:
    """Return the error for a create that GraphQL refused; Unknown if the message is not recognised.

    GraphQL has no status codes, so only messages that certainly mean that no pod was created are taken as that.
    """
    if is_sold_out(words):
        return NoCapacity(words)
    if _NO_FUNDS.search(words):
        return _refuse_balance(words)
    if any(sign in words for sign in ("Syntax Error", "Cannot query", "is not defined by type", "was not provided")):
        return Rejected(words, of_offer=True)
    return Unknown(words)


def _refuse_balance(words: str) -> RejectedFor:
    what = f"The balance at RunPod does not cover one hour of this pod ({words})."
    return RejectedFor(no_funds(what, billing_url=_BILLING_URL))


def is_sold_out(words: str) -> bool:
    """Return whether a refusal is about capacity. RunPod has no code for that, so its message decides."""
    return any(sign in words.lower() for sign in _SOLD_OUT)


def explain_runpod_answer(answer: Answer) -> SetupError | Unknown:
    """Return the error for an unexpected answer to a request that was not a create."""
    words = describe_runpod_error(answer)
    if answer.status == 401:
        return bad_key(f"RunPod refuses the key ({words}).", hint=_ANOTHER_KEY)
    if answer.status == 403:
        return not_allowed(f"RunPod does not allow this request with this key ({words}).", hint=_ANOTHER_KEY)
    if answer.status == 410:
        return retired_error(f"RunPod no longer supports this kind of request ({words}).")
    return Unknown(f"RunPod gave no clear answer ({words})")


def money(value: object) -> Micros | None:
    """Return an amount of dollars from RunPod, rounded up to a micro-dollar; None if it is not an amount.

    RunPod's amounts passed through floats (14.320000000000002). If rounding to seven digits changes one by less than a
    micro-dollar, the difference is taken as float noise.
    """
    amount = _parse_number(value)
    if amount is None:
        return None
    plain = Precision(prec=7).plus(amount)
    return usd(plain if abs(plain - amount) < _NOISE_USD else amount)


def rate(value: object) -> Micros | None:
    """Return an hourly rate; None if it is missing or zero, as for a stopped pod.

    RunPod's prices passed through single-precision floats: 36.72 may arrive as 36.720001220703125. So the rate is the
    shortest decimal that such a float can stand for. The relative error is below 2e-7.
    """
    amount = _parse_number(value)
    if amount is None or amount <= 0:
        return None
    for places in range(_MOST_PLACES + 1):
        short = amount.quantize(Decimal(1).scaleb(-places))
        if abs(short - amount) <= amount * _SINGLE_NOISE:
            return usd(short)
    return usd(amount)


def _parse_number(value: object) -> Decimal | None:
    """Return a number that may be an amount of dollars; None for anything else. The JSON was parsed without floats."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return None
    amount = Decimal(value)
    return amount if amount.is_finite() and amount.adjusted() <= _MOST_DIGITS else None
