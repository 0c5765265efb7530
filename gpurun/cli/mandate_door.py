"""Allows only some commands under a mandate: those that read, and those that start or end the mandate's own runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpurun.core.errors import UsageError

if TYPE_CHECKING:
    from gpurun.planning.mandate_bounds import Bounds

ALLOWED = frozenset(
    {
        "offers", "plan", "train", "run", "ps", "attach", "wait", "logs", "stop", "resume", "collect", "destroy",
        "receipt", "budget", "mandate show", "mcp", "recipes list", "recipes show", "config show", "config path",
        "help", "version",
    }
)  # fmt: skip
"""The commands that are allowed. Others may spend money, reveal a key, or run code on this computer."""


def require_allowed(bounds: Bounds, name: str) -> None:
    """Raise UsageError for a command that a mandate does not allow."""
    if name not in ALLOWED:
        what = f"gpurun {name} is not allowed under a mandate; {bounds.left_words()}."
        raise UsageError("mandate.verb", what, hint="Ask the person who gave you the mandate to do it.")


def refuse_notices(bounds: Bounds, notify: str, program: str) -> None:
    """Raise UsageError for --notify and --exec, because they send data anywhere or run a program on this computer."""
    for flag, value in (("--notify", notify), ("--exec", program)):
        if value:
            what = f"{flag} is not allowed under a mandate; {bounds.left_words()}."
            raise UsageError("mandate.flag", what, hint="Leave it out; gpurun wait reports the end.")
