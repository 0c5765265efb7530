"""The errors of REST v2 (RFC 9457): the code that finds an error raises it, and the server answers with it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

SOLD_OUT = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)


class Problem(Exception):
    """An error answer."""

    def __init__(self, status: int, detail: str, errors: list[str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.errors = status, detail, errors

    def as_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }
        return body | ({"errors": self.errors} if self.errors else {})
