"""What Lambda's answers mean. Only `error.code` decides: its messages may change, and an edge answers in HTML."""

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
    "global/forbidden": (not_allowed, "the key", "Give the key of somebody who may: gpurun auth set lambda."),
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
"""Keys and accounts that are refused: as which error, what is refused, and what to do about it."""
_WRONG = frozenset(
    {"global/invalid-parameters", "instance-operations/launch/file-system-in-wrong-region", NOT_THERE, NO_SUCH_PATH}
)
"""The codes of a request that was turned down as a whole."""
# Lambda's keys have dots and underscores in them, and the base64 of a host key may be repeated from the request.
_KEY_LIKE = re.compile(r"[A-Za-z0-9+/=_.]{40,}")
_MOST_DIGITS = 9


def is_success(answer: Answer) -> bool:
    """Whether an answer is one of success; what it says is another matter."""
    return 200 <= answer.status < 300 and not _error(answer)


def code_of(answer: Answer) -> str:
    """The code of an error; empty where there is none, as in an answer that is not JSON."""
    return str(_error(answer).get("code") or "")


def describe_lambda_error(answer: Answer) -> str:
    """Code and message of an error on one line of moderate length; a key that it repeats is left out."""
    error = _error(answer)
    said = [str(part) for part in (error.get("code"), error.get("message")) if part]
    told = _KEY_LIKE.sub("•••", answer_words(": ".join(said)))[:300]
    return f"HTTP {answer.status}: {told}" if told else f"HTTP {answer.status} without a reason"


def read_data(answer: Answer, kind: type[Any]) -> Any:
    """The data of an answer, which must be of this kind; what else came is raised as trouble."""
    told = answer.json
    if not is_success(answer):
        raise explain_lambda_answer(answer)
    if not isinstance(told, dict) or not isinstance(told.get("data"), kind):
        raise Unknown("Lambda's answer cannot be read")
    return told["data"]


def judge_launch_answer(answer: Answer) -> NoCapacity | Rejected | Unknown:
    """What an answer to a launch that names no instance says about whether there is one."""
    code, words = code_of(answer), describe_lambda_error(answer)
    if 400 <= answer.status < 500 and code == _SOLD_OUT:
        return NoCapacity(words)
    if 400 <= answer.status < 500 and code in _WRONG:
        return Rejected(words)
    told = _about_the_account(answer, code, words)
    # An instance quota says nothing about another provider's offer, which may come next.
    return RejectedFor(told, of_offer=code == _NO_QUOTA) if told else Unknown(f"Lambda answered {words}")


def explain_lambda_answer(answer: Answer) -> SetupError | Unknown:
    """What an unexpected answer to anything but a launch is."""
    code, words = code_of(answer), describe_lambda_error(answer)
    told = _about_the_account(answer, code, words)
    return told if isinstance(told, SetupError) else Unknown(f"Lambda answered {words}")


def _about_the_account(answer: Answer, code: str, words: str) -> GpurunError | None:
    """The refusals that somebody can mend: a key, an account, a quota."""
    if not 400 <= answer.status < 500:
        return None
    if code == _NO_QUOTA:
        hint = f"Nothing was made; ask Lambda's support for a higher instance quota: {_SUPPORT}."
        return no_quota(f"Lambda's quota for this account is used up ({words}).", hint=hint)
    if code in _ACCOUNT:
        error, refused, hint = _ACCOUNT[code]
        return error(f"Lambda refuses {refused} ({words}).", hint=hint)
    return None


def hourly(cents: object) -> Micros | None:
    """A price of cents for an hour of the whole machine; None for what is none, which includes zero."""
    if isinstance(cents, bool) or not isinstance(cents, int | Decimal):
        return None
    amount = Decimal(cents)
    if not amount.is_finite() or amount <= 0 or amount.adjusted() > _MOST_DIGITS:
        return None
    return usd(amount.scaleb(-2))


def get_nested(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object within another; an empty one where there is none."""
    found = told.get(name)
    return found if isinstance(found, dict) else {}


def _error(answer: Answer) -> dict[str, Any]:
    told = answer.json
    return get_nested(told, "error") if isinstance(told, dict) else {}
