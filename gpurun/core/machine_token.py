"""The token of a machine: the name under which it is made, found again and ended. Its form stands here alone.

    gpurun-HOME-DEADLINE-RANDOM-RUN      gpurun-3fa9c1-1795246236-7c0d2e-fox-41

It says by itself whose machine it is and until when, so that nobody needs a tag that somebody may edit. `gr-RUN-RANDOM`
is an older gpurun's, and says neither.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from gpurun.core.paths import RUN_NAME

MOST = 60
"""Characters: of the 64 that an AWS client token may have, a zone takes two."""
PREFIXES = ("gpurun-", "gr-")
"""How a token begins, for the lists that can be filtered by that."""

_FORM = re.compile(r"gpurun-([0-9a-f]{6})-([0-9]{10})-[0-9a-f]{6}-([a-z0-9][a-z0-9-]{0,39})")
_OLD_FORM = re.compile(r"gr-([a-z0-9-]{1,40})-[0-9a-f]{8}")
_SECONDS = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True)
class Token:
    """A token and what it says: the home that made it ("" unknown), the deadline by its provider's clock, and the run.

    A long run's name is cut there.
    """

    text: str
    home: str
    deadline_wall: float | None
    run: str

    def run_or(self, told: str | None) -> str:
        """The run, by its whole name where a tag tells one that fits the token."""
        return told if told and RUN_NAME.fullmatch(told) and self.run in (told, _cut(told)) else self.run

    def deadline_or(self, told: str | None) -> float | None:
        """The deadline; only of a token that says none by a tag, where that is whole seconds since the epoch."""
        return float(told) if self.deadline_wall is None and told and _SECONDS.fullmatch(told) else self.deadline_wall


def make_token(home: str, deadline_wall: float, run: str) -> str:
    """A new token for a machine of a run; it is a file name, a host name and an idempotency key alike."""
    return f"gpurun-{home}-{int(deadline_wall):010d}-{secrets.token_hex(3)}-{_cut(run)}"


def parse_token(*texts: str | None) -> Token | None:
    """The token that the first of these texts is which is one; else None."""
    for text in filter(None, texts):
        if len(text) <= MOST and (told := _FORM.fullmatch(text)):
            return Token(text, told[1], float(told[2]), told[3])
        if told := _OLD_FORM.fullmatch(text):
            return Token(text, "", None, told[1])
    return None


def _cut(run: str) -> str:
    return run[: MOST - len("gpurun-3fa9c1-1795246236-7c0d2e-")].rstrip("-")
