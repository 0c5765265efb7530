"""Makes text from the instance harmless before anything draws it.

The instance is not trusted: what it prints may hold escape sequences that move the cursor, set the
clipboard (OSC 52) or retitle the window, C1 controls, bidirectional overrides, invisible characters, half a UTF-8
sequence or ten megabytes without a newline. What leaves this module is one line of printing characters of bounded
length. Square brackets pass as they are: nothing in this room reads markup.
"""

from __future__ import annotations

import re
import unicodedata

MAX_LINE_BYTES = 4096
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Control strings (OSC, DCS, SOS, PM, APC) with their whole payload, then CSI, then the short escapes. Each class
# excludes ESC, so that the match is linear in the length of the line.
_SEQUENCES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
)
_INVISIBLE_LETTERS = frozenset("\u115f\u1160\u17b4\u17b5\u3164\uffa0")
_MOST_MARKS = 2


def safe_line(line: bytes | str) -> str:
    """One line, harmless: at most 4 KiB of what came, and a mark with the true size when there was more.

    Escape sequences vanish whole; a progress bar that rewrites itself with carriage returns shows its last state.
    """
    size = len(line)
    head = line[:MAX_LINE_BYTES]
    if isinstance(head, str):
        raw = head.encode("utf-8", "surrogatepass")
        cut = size > MAX_LINE_BYTES or len(raw) > MAX_LINE_BYTES
        text = raw[:MAX_LINE_BYTES].decode("utf-8", "replace")
    else:
        cut = size > MAX_LINE_BYTES
        text = head.decode("utf-8", "replace")
    written = [part for part in _SEQUENCES.sub("", text).rstrip("\r\n").split("\r") if part]
    shown = harmless(written[-1].expandtabs(4) if written else "")[:MAX_LINE_BYTES]
    return f"{shown} \N{HORIZONTAL ELLIPSIS} [line of {size:,} cut]" if cut else shown


def safe_text(text: bytes | str, *, most_lines: int = 40) -> list[str]:
    """Several lines, each harmless; what lies beyond `most_lines` is left out and counted in a last line."""
    head = text[: MAX_LINE_BYTES * most_lines]
    broken = head.split(b"\n") if isinstance(head, bytes) else head.split("\n")
    lines = [safe_line(line) for line in broken[:most_lines]]
    if len(broken) > most_lines or len(text) > len(head):
        lines.append(f"\N{HORIZONTAL ELLIPSIS} [cut: {len(text):,} in all]")
    return lines


def harmless(text: str) -> str:
    """The same text without anything that does not print; separators become spaces, oddities U+FFFD. Any length."""
    if text.isascii() and text.isprintable():
        return text
    kept: list[str] = []
    marks = 0
    for character in text:
        category = unicodedata.category(character)
        if category in ("Mn", "Me"):
            marks += 1
            if marks <= _MOST_MARKS and not "\ufe00" <= character <= "\ufe0f" and character not in _INVISIBLE_LETTERS:
                kept.append(character)
            continue
        marks = 0
        if category in ("Zs", "Zl", "Zp") or character in "\t\n\v\f":
            kept.append(" ")
        elif category in ("Cs", "Co", "Cn"):
            kept.append(REPLACEMENT)
        elif category not in ("Cc", "Cf") and character not in _INVISIBLE_LETTERS:
            kept.append(character)
    return "".join(kept)
