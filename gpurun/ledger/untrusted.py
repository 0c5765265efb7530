"""Makes what an instance said fit for a record: bounded in length and depth, without control characters.

Which characters count as control is written out here, not taken from Python's Unicode tables: a receipt has to come out
the same, byte for byte, under another Python.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINE_CHARS = 400
TEXT_CHARS = 4_000
_LINE_BYTES = 64 << 10
_MOST_ITEMS, _MOST_DEPTH, _MOST_CHARS = 64, 6, 16 << 10

# C0, DEL, C1; marks that are invisible or turn the direction of text; halves of pairs; tags; what is no character.
_CONTROLS = re.compile(
    "[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff0-\ufffb\ufffe\uffff\U000e0000-\U000e0fff]"
)


def plain_line(text: str, limit: int = LINE_CHARS) -> str:
    """One line of at most `limit` characters; every control character is written as its escape."""
    shown = _CONTROLS.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def plain_text(text: str, limit: int = TEXT_CHARS) -> str:
    """Several lines of at most `limit` characters together; line ends stay, tabs become spaces."""
    return "\n".join(plain_line(line, limit) for line in text[:limit].replace("\t", "    ").split("\n"))[:limit]


def plain_data(value: Any) -> Any:
    """JSON data of bounded size; a part that does not fit or is no number becomes null, and so does too much of it."""
    plain = _plain(value, 0)
    return plain if len(json.dumps(plain)) <= _MOST_CHARS else None


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return plain_line(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth < _MOST_DEPTH and isinstance(value, dict):
        kept = sorted(((str(key), one) for key, one in value.items()), key=lambda pair: pair[0])[:_MOST_ITEMS]
        return {plain_line(key, 80): _plain(one, depth + 1) for key, one in kept}
    if depth < _MOST_DEPTH and isinstance(value, list | tuple):
        return [_plain(one, depth + 1) for one in value[:_MOST_ITEMS]]
    return None


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file that may be huge or hostile: the beginning of each, whatever its bytes; none if no file."""
    if not path.is_file():
        return
    with path.open("rb") as content:
        inside = False
        while part := content.readline(_LINE_BYTES):
            if not inside:
                yield part.decode("utf-8", "replace").rstrip("\r\n")
            inside = not part.endswith(b"\n")


def events_of(path: Path) -> Iterator[dict[str, Any]]:
    """The trainer's events; a line that is none, or that is longer than any event, is passed over."""
    for line in lines_of(path):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event
