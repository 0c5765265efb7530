"""Makes untrusted bytes harmless: the output of an instance, a provider's reply, or a file that anyone may have edited.

`plain_*` is for records: every control character is written as its escape. The list of them stands here, not in
Python's Unicode tables, because a receipt must come out the same, byte for byte, under another Python version.
`safe_*` is for screens: escape sequences that move the cursor, set the clipboard (OSC 52) or retitle the window, C1
controls, bidirectional overrides and invisible characters are removed. Both results have a bounded length. Square
brackets pass unchanged: no markup is parsed.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpurun.core.errors import GpurunError
from gpurun.core.paths import MOST_RECORD_BYTES, open_regular, read_regular

LINE_CHARS = 400
TEXT_CHARS = 4_000
LINE_BYTES = 64 << 10
"""No valid line of the trainer's files is longer."""
MAX_LINE_BYTES = 4096
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_ITEMS, _MOST_DEPTH, _MOST_CHARS = 64, 6, 16 << 10
_DEEPEST, _MOST_MEMBERS = 100, 2_000_000
_LARGEST = 1e100  # Far above any loss, rate or size; arithmetic on larger numbers may become infinite.

# C0, DEL, C1; invisible marks and changes of text direction; surrogate halves; tags; noncharacters.
_CONTROLS = re.compile(
    "[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff0-\ufffb\ufffe\uffff\U000e0000-\U000e0fff]"
)
# Control strings (OSC, DCS, SOS, PM, APC) with their whole payload, then CSI, then the short escapes. Each class
# excludes ESC, so that the match is linear in the length of the line.
_SEQUENCES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
)
_INVISIBLE_LETTERS = frozenset("\u115f\u1160\u17b4\u17b5\u3164\uffa0")
_MOST_MARKS = 2
_TAG = re.compile(r"<[!/A-Za-z][^<>]{0,500}>")


def plain_line(text: str, limit: int = LINE_CHARS) -> str:
    """Return one line of at most `limit` characters; every control character is written as its escape."""
    shown = _CONTROLS.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def plain_text(text: str, limit: int = TEXT_CHARS) -> str:
    """Return several lines of at most `limit` characters together; line ends stay, tabs become spaces."""
    return "\n".join(plain_line(line, limit) for line in text[:limit].replace("\t", "    ").split("\n"))[:limit]


def last_words(output: str | bytes, limit: int = 300) -> str:
    """Return the end of a text for use within a sentence: on one line and without its full stop."""
    text = output[-4 * limit :].decode("utf-8", "replace") if isinstance(output, bytes) else output
    return " ".join(_CONTROLS.sub(" ", text[-limit:]).split()).rstrip(".")


def answer_words(answer: str) -> str:
    """Return a server's error text on one line, without the tags if it sent an HTML page."""
    return " ".join(_TAG.sub(" ", answer).split())


def error_words(error: BaseException) -> str:
    """Return the end of an error's text, which quotes the remote side, or the name of its class if it has no text."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return last_words(text) or type(error).__name__


def plain_data(value: Any) -> Any:
    """Return JSON data of bounded size; a part that does not fit, or an invalid number, becomes null."""
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
        kept = sorted(((str(key), item) for key, item in value.items()), key=lambda pair: pair[0])[:_MOST_ITEMS]
        return {plain_line(key, 80): _plain(item, depth + 1) for key, item in kept}
    if depth < _MOST_DEPTH and isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value[:_MOST_ITEMS]]
    return None


class Malformed(ValueError):
    """The reason why untrusted JSON cannot be used, without a full stop."""


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _fitting(text: str) -> int | None:
    value = int(text) if len(text) <= 20 else 1 << 64
    return value if -(1 << 63) <= value < 1 << 63 else None


Numbers = tuple[Callable[[str], Any], Callable[[str], Any]]
AS_WRITTEN: Numbers = (float, int)


def parse_json(
    content: bytes | str, most_bytes: int = MOST_RECORD_BYTES, *, numbers: Numbers = (_finite, _fitting)
) -> Any:
    """Return the value of untrusted JSON; Malformed if it is invalid, too large or nested too deeply.

    A number that is not finite, or does not fit 64 bits, becomes null, so that its reader sees a missing value.
    With `numbers` AS_WRITTEN, numbers are read as Python reads them.
    """
    if len(content) > most_bytes:
        raise Malformed(f"it has more than {most_bytes:,} bytes")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        demand_few_members(text)
        value = json.loads(text, parse_float=numbers[0], parse_int=numbers[1], parse_constant=lambda _: None)
    except Malformed:
        raise
    except RecursionError:
        raise Malformed("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise Malformed("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise Malformed(f"it is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except ValueError:  # Python refuses integers of more than 4,300 digits.
        raise Malformed("it has a number that is too long") from None
    if text.count("[") + text.count("{") > _DEEPEST and _is_deep(value):
        raise Malformed("it is nested too deeply")
    return value


def demand_few_members(text: str) -> None:
    """Raise Malformed for JSON with too many members: each takes up to a hundred times its written size in memory.

    A comma or bracket within a string does not count.
    """
    if sum(map(text.count, ",[{")) <= _MOST_MEMBERS:
        return
    bare = text.replace("\\\\", "").replace('\\"', "")
    strings = bare.count('"') // 2
    if strings > 2 * _MOST_MEMBERS or sum(part.count(sign) for part in bare.split('"')[::2] for sign in ",[{") > (
        _MOST_MEMBERS
    ):
        raise Malformed(f"it has more than {_MOST_MEMBERS:,} members")


def parse_object(
    content: bytes | str, most_bytes: int = MOST_RECORD_BYTES, *, numbers: Numbers = (_finite, _fitting)
) -> dict[str, Any]:
    """Return the members of an untrusted JSON object; Malformed for any other value too."""
    value = parse_json(content, most_bytes, numbers=numbers)
    if not isinstance(value, dict):
        raise Malformed("it is not a JSON object")
    return value


def read_object(path: Path, most_bytes: int = MOST_RECORD_BYTES) -> dict[str, Any]:
    """Return the members of the JSON object in a file; OSError if it cannot be read, Malformed if it is not one."""
    return parse_object(read_regular(path, most_bytes), most_bytes)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        inner = (child for outer in level for child in (outer.values() if isinstance(outer, dict) else outer))
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return False
    return True


@contextmanager
def finding(found: Callable[[str], object], what: str) -> Iterator[None]:
    """Turn any exception about an untrusted item into a finding, so that the items after it are checked too."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - Untrusted data can raise anything; it is reported, not hidden.
        found(f"{what}: {fault_words(error)}")


def fault_words(error: Exception) -> str:
    """Return the text of an exception, on one line and without a full stop; prefixed by its class if it is not ours."""
    words = plain_line(str(error)).rstrip(".")
    if isinstance(error, GpurunError | Malformed):
        return words
    return f"{type(error).__name__} {words}".rstrip()


def number(value: Any) -> float | None:
    """Return a finite number of moderate size, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return float(value)


def whole(value: Any) -> int | None:
    """Return a non-negative integer that every JSON reader holds exactly, or None."""
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file that may be huge or hostile, each cut to its beginning; nothing if there is no file."""
    if not path.is_file():
        return
    with open_regular(path) as content:
        inside = False
        while part := content.readline(LINE_BYTES):
            if not inside:
                yield part.decode("utf-8", "replace").rstrip("\r\n")
            inside = not part.endswith(b"\n")


def safe_line(line: bytes | str) -> str:
    """Return one harmless line: at most 4 KiB of the input, and a mark with the true size if it was longer.

    Escape sequences are removed whole; a progress bar that rewrites itself with carriage returns shows its last state.
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
    """Return several harmless lines; lines beyond `most_lines` are left out and counted in a last line."""
    head = text[: MAX_LINE_BYTES * most_lines]
    broken = head.split(b"\n") if isinstance(head, bytes) else head.split("\n")
    lines = [safe_line(line) for line in broken[:most_lines]]
    if len(broken) > most_lines or len(text) > len(head):
        lines.append(f"\N{HORIZONTAL ELLIPSIS} [cut: {len(text):,} in all]")
    return lines


def harmless(text: str) -> str:
    """Return the text without characters that do not print; separators become spaces, others U+FFFD. Any length."""
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
