"""The token of a machine: the name that creates it, finds it again and ends it. Only this module knows its form.

  gpurun-HOME-DEADLINE-RANDOM-RUN      gpurun-3fa9c1-1795246236-7c0d2e-fox-41

It contains its machine's owner and deadline, so that gpurun does not depend on tags, which others may edit.
`gr-RUN-RANDOM` is the form of an older gpurun, without both.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from gpurun.core.paths import RUN_NAME

MOST = 60
"""Characters: an AWS client token may have 64, and a zone takes two of them."""
PREFIXES = ("gpurun-", "gr-")
"""The beginning of every token, for lists that can be filtered by a prefix."""

_FORM = re.compile(r"gpurun-([0-9a-f]{6})-([0-9]{10})-[0-9a-f]{6}-([a-z0-9][a-z0-9-]{0,39})")
_OLD_FORM = re.compile(r"gr-([a-z0-9-]{1,40})-[0-9a-f]{8}")
_SECONDS = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True)
class Token:
    """A token and its parts: the home that made it ("" unknown), the deadline by its provider's clock, and the run.

    The name of a run is cut off if it is long.
    """

    text: str
    home: str
    deadline_wall: float | None
    run: str

    def run_or(self, tag: str | None) -> str:
        """Return the name of the run: the whole name from a tag, if it fits the token."""
        return tag if tag and RUN_NAME.fullmatch(tag) and self.run in (tag, _cut(tag)) else self.run

    def deadline_or(self, tag: str | None) -> float | None:
        """Return the deadline; if the token has none, from a tag in whole seconds since the epoch."""
        return float(tag) if self.deadline_wall is None and tag and _SECONDS.fullmatch(tag) else self.deadline_wall


def make_token(home: str, deadline_wall: float, run: str) -> str:
    """Return a new token for a machine of a run; it can be a file name, a host name and an idempotency key."""
    return f"gpurun-{home}-{int(deadline_wall):010d}-{secrets.token_hex(3)}-{_cut(run)}"


def parse_token(*texts: str | None) -> Token | None:
    """Return the first of these texts that is a token, parsed; None if there is none."""
    for text in filter(None, texts):
        if len(text) <= MOST and (match := _FORM.fullmatch(text)):
            return Token(text, match[1], float(match[2]), match[3])
        if match := _OLD_FORM.fullmatch(text):
            return Token(text, "", None, match[1])
    return None


def _cut(run: str) -> str:
    return run[: MOST - len("gpurun-3fa9c1-1795246236-7c0d2e-")].rstrip("-")
