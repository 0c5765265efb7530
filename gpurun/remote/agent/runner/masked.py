"""Masks a secret in a log: the value, each of its longer lines, and their JSON, repr, base64 and URL forms.

A value that was split, encrypted or reversed is not found (docs/THREATS.md).
"""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

LEAST_BYTES = 8
"""A shorter line, or a shorter form of a value, would match in any log."""
_WRAPS = (64, 76)
_MARK = b"[secret]"


def forms_of(values: list[str]) -> list[bytes]:
    """Return all byte strings to mask for these values, the longest first."""
    found = set()
    for value in values:
        found.add(value.encode("utf-8", "surrogateescape"))
        for part in _split_value(value):
            found.update(form for form in _encode_forms(part) if len(form) >= LEAST_BYTES)
    return sorted(found - {b""}, key=len, reverse=True)


def mask(content: bytes, forms: list[bytes]) -> bytes:
    """Return the content with every form replaced by a mark."""
    for form in forms:
        content = content.replace(form, _MARK)
    return content


def begun_form_bytes(content: bytes, form: bytes) -> int:
    """Return how many bytes at the end of `content` may begin a `form` that continues in the next input."""
    place = content.find(form[:1], max(0, len(content) - len(form) + 1))
    while place >= 0 and not form.startswith(content[place:]):
        place = content.find(form[:1], place + 1)
    return len(content) - place if place >= 0 else 0


def _split_value(value: str) -> Iterator[str]:
    """Yield the value, its lines and, if it is JSON like a service account's key, the strings in it."""
    yield value
    for text in [value, *_find_strings_in_json(value)]:
        yield text
        yield from (line.strip() for line in text.splitlines())


def _find_strings_in_json(value: str) -> list[str]:
    found: list[str] = []
    try:
        waiting = [json.loads(value)]
    except (ValueError, RecursionError):
        return found
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, (dict, list)):
            waiting.extend(part.values() if isinstance(part, dict) else part)
    return found


def _encode_forms(text: str) -> Iterator[bytes]:
    raw = text.encode("utf-8", "surrogateescape")
    yield raw
    yield raw.replace(b"\n", b"\r\n")
    plain = raw.decode("utf-8", "replace")
    for escaped in (json.dumps(plain)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1]):
        yield escaped.encode("utf-8", "replace")
        yield escaped.replace("/", "\\/").encode("utf-8", "replace")
    yield repr(plain)[1:-1].encode("utf-8", "replace")
    yield repr(raw)[2:-1].encode("utf-8", "replace")
    for quoted in (quote(raw), quote(raw, safe=""), quote_plus(raw)):
        yield quoted.encode()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        # The base64 form depends on the value's offset in the encoded text, for example after "user:".
        for shift in range(3):
            bits = 8 * (shift + len(raw))
            whole = encode(b"\0" * shift + raw)[(8 * shift + 5) // 6 : bits // 6]
            yield whole
            for width in _WRAPS:
                yield from (whole[at : at + width] for at in range(0, len(whole), width) if len(whole) > width)
