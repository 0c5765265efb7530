"""Finds the text that explains why a command failed: the last line that names an error, except a launcher's report."""

from __future__ import annotations

import re
from collections import deque

LAST_LINES, MOST_CHARS = 400, 4000
"""How many of the last lines are searched (an earlier error did not end the command), and the limit of a line."""
# The prefix that torchrun adds, such as `[rank0]: `.
RANK = re.compile(r"^(?:\[(?:[a-z]*\d+|default)\]:? ?)+", re.IGNORECASE)
RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Failure)\b\s*(?::|$)")
NAMED = re.compile(
    r"(?i)\berror\b['\]]?\s*:(?!\s*[\d.+-])|\[error\]|\bfatal\b|\bout of memory\b|\bno space left\b|\bcore dumped\b"
    r"|\bsegmentation fault\b|\bnccl\b.*\b(?:error|fail|abort|timeout|timed out)|\bcommand not found\b"
    r"|\bno such file or directory\b|\bpermission denied\b|\bassertion\b.*\bfailed\b|\billegal memory access\b"
)
# What a launcher reports about another process that failed.
SECOND_HAND = re.compile(r"ChildFailedError|CalledProcessError|torch[./]distributed[./]elastic|ProcessExited")
TRACEBACK, IGNORED = "Traceback (most recent call last):", "Exception ignored in"


class LastWords:
    """Keeps the last lines of a command, and searches them once the command has ended."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LAST_LINES)

    def take(self, line: str) -> None:
        """Add a line, with its leading spaces."""
        self.lines.append(line[:MOST_CHARS])

    @property
    def text(self) -> str:
        """Return the explanation; "" if the command printed nothing."""
        last = error = second_hand = ""
        is_raising = is_ignored = False
        for line in self.lines:
            rest = RANK.sub("", line)
            words, is_indented = rest.strip(), rest[:1].isspace()
            if not re.search(r"\w", words):
                continue  # This is a drawn line, such as `=====`.
            last = words
            is_ignored = is_ignored or words.startswith(IGNORED)
            if words == TRACEBACK:
                is_raising = True
            elif not is_indented:
                is_raised, is_raising = is_raising, False
                if is_raised and is_ignored:
                    is_ignored = False
                elif SECOND_HAND.search(words):
                    second_hand = words
                elif is_raised or RAISED.match(words) or NAMED.search(words):
                    error = words
        return error or second_hand or last
