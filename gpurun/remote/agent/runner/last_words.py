"""Finds the words that tell why a command failed: the last line that names an error, not a launcher's table."""

from __future__ import annotations

import re

NEAR = 400
"""An error that was named more lines before the end is not why it ended."""
RANK = re.compile(r"^(?:\[(?:[a-z]*\d+|default)\]:? ?)+", re.IGNORECASE)  # `[rank0]: `, as torchrun puts it.
RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Failure)\b\s*(?::|$)")
NAMED = re.compile(
    r"(?i)\berror\b['\]]?\s*:(?!\s*[\d.+-])|\[error\]|\bfatal\b|\bout of memory\b|\bno space left\b|\bcore dumped\b"
    r"|\bsegmentation fault\b|\bnccl\b.*\b(?:error|fail|abort|timeout|timed out)|\bcommand not found\b"
    r"|\bno such file or directory\b|\bpermission denied\b|\bassertion\b.*\bfailed\b|\billegal memory access\b"
)
# What a launcher says of another process that failed.
SECOND_HAND = re.compile(r"ChildFailedError|CalledProcessError|torch[./]distributed[./]elastic|ProcessExited")
TRACEBACK, IGNORED = "Traceback (most recent call last):", "Exception ignored in"


class LastWords:
    """Hears the lines of a command, one after the other."""

    def __init__(self) -> None:
        self.last = self.error = self.second_hand = ""
        self.since = 0  # Lines since the error.
        self.is_raising = self.is_ignored = False

    def take(self, line: str) -> None:
        """Hear a line, with the spaces at its beginning."""
        rest = RANK.sub("", line)
        words, is_indented = rest.strip(), rest[:1].isspace()
        self.since += 1
        if not re.search(r"\w", words):
            return  # It is drawn: `=====`.
        self.last = words
        self.is_ignored = self.is_ignored or words.startswith(IGNORED)
        if words == TRACEBACK:
            self.is_raising = True
        elif not is_indented:
            is_raised, self.is_raising = self.is_raising, False
            if is_raised and self.is_ignored:
                self.is_ignored = False
            elif SECOND_HAND.search(words):
                self.second_hand = words
            elif is_raised or RAISED.match(words) or NAMED.search(words):
                self.error, self.since = words, 0

    @property
    def text(self) -> str:
        """The words; "" where it said nothing."""
        return (self.error if self.since <= NEAR else "") or self.second_hand or self.last
