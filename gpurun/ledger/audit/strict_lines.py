"""Reads journals and the chain of receipts strictly, byte by byte, with code of its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.core.errors import SetupError
from gpurun.core.journal_records import Event
from gpurun.core.paths import read_regular
from gpurun.core.records import canonical
from gpurun.core.untrusted import AS_WRITTEN, parse_object

GENESIS = "0" * 64
_RECORD_KEYS = {"seq", "prev", "wall", "mono", "boot_id", "event", "data"}
_LINK_TYPES = {"seq": int, "run": str, "receipt_sha256": str, "prev": str}
KNOWN = frozenset(str(event) for event in Event)
_MOST_S = 1e11  # Beyond the year 5000.

Json = dict[str, Any]


@dataclass(frozen=True)
class Lines:
    """The sound lines of a file from its beginning: parsed, and the sha256 of each.

    `torn`: an unfinished last line; `hides_intent`: a journal's rest, which does not hold, asked for a machine.
    """

    parsed: tuple[Json, ...]
    digests: tuple[str, ...]
    problem: str | None
    torn: bool
    hides_intent: bool = False


def journal_lines(path: Path) -> Lines:
    """A journal up to the first line that does not hold: its form, its number, its link to the line before."""
    try:
        raw, torn = _split(path)
    except OSError as error:
        return Lines((), (), f"the journal cannot be read: {error.strerror}", torn=False)
    parsed: list[Json] = []
    digests = [GENESIS]
    for number, line in enumerate(raw, start=1):
        record = _canonical_object(line)
        problem = _problem_of(record, number, digests[-1])
        if record is None or problem is not None:
            is_hidden = any(f'"{Event.CREATE_INTENDED}"'.encode() in rest for rest in raw[number - 1 :])
            digests, where = digests[1:], f"journal line {number} {problem}"
            return Lines(tuple(parsed), tuple(digests), where, torn=False, hides_intent=is_hidden)
        parsed.append(record)
        digests.append(hashlib.sha256(line).hexdigest())
    return Lines(tuple(parsed), tuple(digests[1:]), None, torn)


def _problem_of(record: Json | None, number: int, before: str) -> str | None:
    if record is None or not set(record) >= _RECORD_KEYS:
        return "is not a record"
    numbers = all(_is_time(record[clock]) for clock in ("wall", "mono"))
    if not numbers or not isinstance(record["data"], dict) or not isinstance(record["event"], str):
        return "is not a record that this gpurun knows"
    if record["seq"] != number:
        return f"says that it is line {record['seq']}"
    if record["prev"] != before:
        return "does not follow from the line before it"
    if (record["event"] == Event.RUN_CLOSED or "seal" in record["data"]) and not _is_sealed(record):
        return "does not match its own seal"
    return None


def _is_time(value: Any) -> bool:
    """Whether it is a number of seconds that a clock can have shown: every sum of such can be told and compared."""
    return type(value) in (float, int) and abs(value) < _MOST_S


def _is_sealed(record: Json) -> bool:
    """Whether a closing line, which no line after it confirms, still is what its own digest says."""
    unsealed = {**record, "data": {key: value for key, value in record["data"].items() if key != "seal"}}
    return bool(record["data"].get("seal") == hashlib.sha256(canonical(unsealed)).hexdigest())


def chain_lines(path: Path) -> tuple[tuple[Json, ...], tuple[str, ...]]:
    """Every readable line of the chain of receipts, and what is wrong with the lines or their order.

    A SetupError where the file cannot be read at all.
    """
    try:
        raw, torn = _split(path)
    except OSError as error:
        hint = "Give yourself read access to it; nothing can be held against a chain that cannot be read."
        raise SetupError("ledger.unreadable", f"{path} cannot be read: {error.strerror}.", hint=hint) from error
    links: list[Json] = []
    runs = set[str]()
    problems = ["the last line of the chain is torn; the next receipt that is written repairs it"] if torn else []
    before = GENESIS
    for number, line in enumerate(raw, start=1):
        link = _canonical_object(line)
        if link is None or {key: type(value) for key, value in link.items()} != _LINK_TYPES:
            problems.append(f"line {number} of the chain is not a link")
            continue
        if link["seq"] != number:
            problems.append(f"line {number} of the chain is receipt #{link['seq']}: one is missing or out of order")
        if link["prev"] != before:
            problems.append(f"receipt #{link['seq']} does not follow the one before it in the chain")
        if link["run"] in runs:
            problems.append(f"the run {link['run']!r} is in the chain twice")
        before = link["receipt_sha256"]
        links.append(link)
        runs.add(link["run"])
    return tuple(links), tuple(problems)


def _split(path: Path) -> tuple[list[bytes], bool]:
    """The whole lines of a file, and whether something unfinished follows them: no line end, or a power cut's zeros."""
    *raw, rest = (read_regular(path) if path.exists() else b"").split(b"\n")
    zeroed = not rest and bool(raw) and b"\0" in raw[-1]
    return raw[:-1] if zeroed else raw, zeroed or bool(rest)


def _canonical_object(line: bytes) -> Json | None:
    """A JSON object written in exactly the one canonical way, or None."""
    try:
        value = parse_object(line, numbers=AS_WRITTEN)
        return value if canonical(value) == line else None
    except ValueError:  # Malformed, or a number that is not finite.
        return None
