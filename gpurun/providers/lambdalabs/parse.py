"""Interprets Lambda's answers. Only `error.code` counts: messages may change, and Lambda's proxy answers in HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from gpurun.core.errors import GpurunError, SetupError
from gpurun.core.money import Micros, usd
from gpurun.core.untrusted import answer_words
from gpurun.providers._http import Answer
from gpurun.providers.base import NoCapacity, Rejected, Unknown
from gpurun.providers.errors import RejectedFor, bad_key, no_quota, not_allowed, not_ready

NOT_THERE = "global/object-does-not-exist"
NO_SUCH_PATH = "global/not-found"
_SOLD_OUT = "instance-operations/launch/insufficient-capacity"
_NO_QUOTA = "global/quota-exceeded"
_CONSOLE, _SUPPORT = "https://cloud.lambda.ai", "https://support.lambda.ai"
_ACCOUNT = {
    "global/invalid-api-key": (bad_key, "the key", "Give another key: gpurun auth set lambda."),
    "global/forbidden": (not_allowed, "the key", "Give a key with that permission: gpurun auth set lambda."),
    "global/account-inactive": (
        not_ready,
        "the account",
        f"It needs a verified e-mail address and a payment method: {_CONSOLE}.",
    ),
    "global/invalid-address": (
        not_ready,
        "the account",
        f"Its billing address is not valid: correct it at {_CONSOLE}.",
    ),
}
"""The codes for refused keys and accounts: the error, what Lambda refuses, and the hint."""
_WRONG = frozenset(
    {"global/invalid-parameters", "instance-operations/launch/file-system-in-wrong-region", NOT_THERE, NO_SUCH_PATH}
)
"""The codes for a launch that Lambda refused as invalid, so that it created no instance."""
# Lambda's keys contain dots and underscores, and an answer may repeat the base64 of a host key from the request.
_KEY_LIKE = re.compile(r"[A-Za-z0-9+/=_.]{40,}")
_MOST_DIGITS = 9


def is_success(answer: Answer) -> bool:
    """Return whether the answer reports success. Its content is not checked."""
    return 200 <= answer.status < 300 and not _parse_error(answer)


def code_of(answer: Answer) -> str:
    """Return the error code of an answer; "" if it has none, for example because it is not JSON."""
    return str(_parse_error(answer).get("code") or "")


def describe_lambda_error(answer: Answer) -> str:
    """Return code and message of an error on one line of limited length. A key that it repeats is removed."""
    error = _parse_error(answer)
    parts = [str(part) for part in (error.get("code"), error.get("message")) if part]
    text = _KEY_LIKE.sub("•••", answer_words(": ".join(parts)))[:300]
    return f"HTTP {answer.status}: {text}" if text else f"HTTP {answer.status} without a reason"


def read_data(answer: Answer, kind: type[Any]) -> Any:
    """Return the data of an answer. Raises an error for a refusal, or if the data is not of type `kind`."""
    payload = answer.json
    if not is_success(answer):
        raise explain_lambda_answer(answer)
    if not isinstance(payload, dict) or not isinstance(payload.get("data"), kind):
        raise Unknown("Lambda's answer cannot be read")
    return payload["data"]


def judge_launch_answer(answer: Answer) -> NoCapacity | Rejected | Unknown:
    """Return the error for a launch that returned no instance; Unknown if there may be an instance nevertheless."""
    code, words = code_of(answer), describe_lambda_error(answer)
    if 400 <= answer.status < 500 and code == _SOLD_OUT:
        return NoCapacity(words)
    if 400 <= answer.status < 500 and code in _WRONG:
        return Rejected(words)
    refusal = _account_error(answer, code, words)
    # Another provider's offer may be tried next, because the quota is Lambda's alone.
    return RejectedFor(refusal, of_offer=code == _NO_QUOTA) if refusal else Unknown(f"Lambda answered {words}")


def explain_lambda_answer(answer: Answer) -> SetupError | Unknown:
    """Return the error for an unexpected answer to a request that was not a launch."""
    code, words = code_of(answer), describe_lambda_error(answer)
    refusal = _account_error(answer, code, words)
    return refusal if isinstance(refusal, SetupError) else Unknown(f"Lambda answered {words}")


def _account_error(answer: Answer, code: str, words: str) -> GpurunError | None:
    """Return the error if the key, the account or its quota is the reason; else None."""
    if not 400 <= answer.status < 500:
        return None
    if code == _NO_QUOTA:
        hint = f"Nothing was created; ask Lambda's support for a higher instance quota: {_SUPPORT}."
        return no_quota(f"Lambda's quota for this account is used up ({words}).", hint=hint)
    if code in _ACCOUNT:
        error, refused, hint = _ACCOUNT[code]
        return error(f"Lambda refuses {refused} ({words}).", hint=hint)
    return None


def hourly_price(cents: object) -> Micros | None:
    """Return a machine's price per hour from a number of cents; None if it is zero, or not a number."""
    if isinstance(cents, bool) or not isinstance(cents, int | Decimal):
        return None
    amount = Decimal(cents)
    if not amount.is_finite() or amount <= 0 or amount.adjusted() > _MOST_DIGITS:
        return None
    return usd(amount.scaleb(-2))


def get_nested(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object under a key of another object; {} if there is none."""
    found = entry.get(name)
    return found if isinstance(found, dict) else {}


def _parse_error(answer: Answer) -> dict[str, Any]:
    payload = answer.json
    return get_nested(payload, "error") if isinstance(payload, dict) else {}
