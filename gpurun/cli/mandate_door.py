"""Allow only some verbs under a mandate: those that read, and those that start and end its own runs."""

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
"""All other verbs are refused, also new ones: they may spend, reveal a key, or run code on this computer."""


def demand_verb(bounds: Bounds, name: str) -> None:
    """Raise a UsageError for a verb that a mandate does not allow."""
    if name not in ALLOWED:
        what = f"gpurun {name} is not allowed under a mandate; {bounds.left_words()}."
        raise UsageError("mandate.verb", what, hint="Ask the person who gave you the mandate to do it.")


def demand_no_notices(bounds: Bounds, notify: str, program: str) -> None:
    """Raise a UsageError for notices, because they send data anywhere or run a program here."""
    for flag, value in (("--notify", notify), ("--exec", program)):
        if value:
            what = f"{flag} is not allowed under a mandate; {bounds.left_words()}."
            raise UsageError("mandate.flag", what, hint="Leave it out; gpurun wait reports the end.")
