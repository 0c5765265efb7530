"""The one way in which preparing ends badly: a refusal that says what is wrong and what to do about it."""

from __future__ import annotations


class Refusal(Exception):
    """What was asked for cannot be prepared; nothing was left behind."""

    def __init__(self, code: str, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint

    def as_record(self) -> dict[str, str]:
        """The refusal as it is printed."""
        return {"code": self.code, "message": self.message, "hint": self.hint}
