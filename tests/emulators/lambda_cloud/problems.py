"""The errors of the API: the code that finds an error raises it, and the server answers with it."""

from __future__ import annotations

from typing import Any

_TOLD = {
    "global/invalid-api-key": "API key was invalid, expired, or deleted.",
    "global/account-inactive": "Your account is inactive.",
    "global/invalid-address": "Your billing address is invalid.",
    "global/quota-exceeded": "Quota exceeded.",
    "global/invalid-parameters": "Invalid request data.",
    "global/object-does-not-exist": "Specified instance does not exist.",
    "global/not-found": "The requested resource was not found.",
    "global/internal-error": "An internal server error occurred.",
    "global/too-many-requests": "Too many requests.",
    "provider/internal-unavailable": "Provider unavailable",
    "instance-operations/launch/insufficient-capacity": "Not enough capacity to fulfill launch request.",
}


class Problem(Exception):
    """An error answer; its default message is the documented one."""

    def __init__(self, status: int, code: str, message: str = "", suggestion: str = "Contact Support.") -> None:
        super().__init__(code)
        self.status, self.code, self.suggestion = status, code, suggestion
        self.message = message or _TOLD.get(code, "Something is wrong.")

    def as_json(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": self.message, "suggestion": self.suggestion}}


def no_instance() -> Problem:
    return Problem(404, "global/object-does-not-exist")


def wrong(message: str) -> Problem:
    return Problem(400, "global/invalid-parameters", message)


def sold_out() -> Problem:
    return Problem(400, "instance-operations/launch/insufficient-capacity")
