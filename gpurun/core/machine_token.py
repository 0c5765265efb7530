"""The token of a machine: the name by which gpurun creates it, finds it and ends it. Only this module knows its form.

  gpurun-HOME-DEADLINE-RANDOM-RUN      gpurun-3fa9c1-1795246236-7c0d2e-fox-41

It contains the machine's owner and deadline, because a provider's tags, which others may edit, are not reliable.
`gr-RUN-RANDOM` is the form of an older gpurun: it has neither owner nor deadline.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from gpurun.core.paths import RUN_NAME

MOST = 60
"""The maximum length: an AWS client token may have 64 characters, and a zone takes two of them."""
PREFIXES = ("gpurun-", "gr-")
"""The beginnings of tokens: every token has one of them. Providers' lists can be filtered by a prefix."""

_FORM = re.compile(r"gpurun-([0-9a-f]{6})-([0-9]{10})-[0-9a-f]{6}-([a-z0-9][a-z0-9-]{0,39})")
_OLD_FORM = re.compile(r"gr-([a-z0-9-]{1,40})-[0-9a-f]{8}")
_SECONDS = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True)
class Token:
    """A token and its parts: the id of the home that made it ("" if unknown), the deadline, and the run's name.

    The deadline is by the provider's clock. A long name of a run is cut off.
    """

    text: str
    home: str
    deadline_wall: float | None
    run: str

    def run_or(self, tag: str | None) -> str:
        """Return the run's whole name from a tag, if that fits the token; else the name in the token."""
        return tag if tag and RUN_NAME.fullmatch(tag) and self.run in (tag, _shorten_run_name(tag)) else self.run

    def deadline_or(self, tag: str | None) -> float | None:
        """Return the deadline in the token, else the one in a tag (whole seconds since the epoch), else None."""
        return float(tag) if self.deadline_wall is None and tag and _SECONDS.fullmatch(tag) else self.deadline_wall


def make_token(home: str, deadline_wall: float, run: str) -> str:
    """Return a new token for a machine of a run; it can be a file name, a host name and an idempotency key."""
    return f"gpurun-{home}-{int(deadline_wall):010d}-{secrets.token_hex(3)}-{_shorten_run_name(run)}"


def parse_token(*texts: str | None) -> Token | None:
    """Return the first of these texts that is a token, parsed; None if there is none."""
    for text in filter(None, texts):
        if len(text) <= MOST and (match := _FORM.fullmatch(text)):
            return Token(text, match[1], float(match[2]), match[3])
        if match := _OLD_FORM.fullmatch(text):
            return Token(text, "", None, match[1])
    return None


def _shorten_run_name(run: str) -> str:
    return run[: MOST - len("gpurun-3fa9c1-1795246236-7c0d2e-")].rstrip("-")
