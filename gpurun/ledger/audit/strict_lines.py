"""Reads journals and the chain of receipts strictly, byte by byte, with its own code."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpurun.core.errors import SetupError
from gpurun.core.journal_records import Event, Record
from gpurun.core.paths import read_regular
from gpurun.core.records import canonical
from gpurun.core.untrusted import AS_WRITTEN, Malformed, parse_object

GENESIS = "0" * 64
_LINK_TYPES = {"seq": int, "run": str, "receipt_sha256": str, "prev": str}

Json = dict[str, Any]


@dataclass(frozen=True)
class Lines:
    """The sound lines of a journal from its beginning, and the sha256 of each.

    `torn`: the last line is unfinished. `hides_intent`: the rest, which is not sound, requests a machine. `is_linked`:
    every whole line names the one before it, even where a line is not sound.
    """

    records: tuple[Record, ...]
    digests: tuple[str, ...]
    problem: str | None
    torn: bool
    hides_intent: bool = False
    is_linked: bool = True


def journal_lines(path: Path) -> Lines:
    """Return a journal up to the first line that is not sound, by its form, its place and the fields of its class.

    A line that lacks a field of its event, or has it in another type, ends what can be relied on.
    """
    try:
        raw, torn = _split(path)
    except OSError as error:
        return Lines((), (), f"the journal cannot be read: {error.strerror}", torn=False, is_linked=False)
    records: list[Record] = []
    digests: list[str] = []
    for number, line in enumerate(raw, start=1):
        try:
            records.append(_record_of(line, number, digests[-1] if digests else GENESIS))
        except Malformed as error:
            is_hidden = any(f'"{Event.CREATE_INTENDED}"'.encode() in rest for rest in raw[number - 1 :])
            problem = f"journal line {number} {error}"
            return Lines(tuple(records), tuple(digests), problem, False, is_hidden, _is_linked(raw))
        digests.append(hashlib.sha256(line).hexdigest())
    return Lines(tuple(records), tuple(digests), None, torn)


def _record_of(line: bytes, number: int, before: str) -> Record:
    """Return what a line records; Malformed if it cannot be relied on."""
    written = _canonical_object(line)
    if written is None:
        raise Malformed("is not a record")
    try:
        record = Record.model_validate_json(line, strict=True)
        _ = record.typed
    except ValidationError as error:
        field = error.errors(include_url=False)[0]["loc"][:1]
        raise Malformed(
            f"is not a record that this gpurun knows: look at its {field[0] if field else 'form'}"
        ) from error
    if record.seq != number:
        raise Malformed(f"has the number {record.seq}")
    if record.prev != before:
        raise Malformed("does not follow from the line before it")
    if (record.event == Event.RUN_CLOSED or "seal" in record.data) and not _is_sealed(written):
        raise Malformed("does not match its own seal")
    return record


def _is_linked(raw: list[bytes]) -> bool:
    """Return whether every line of a journal is JSON and names the digest of the one before it."""
    befores = [GENESIS, *(hashlib.sha256(line).hexdigest() for line in raw)]
    written = [_canonical_object(line) for line in raw]
    return all(line is not None and line.get("prev") == before for line, before in zip(written, befores, strict=False))


def _is_sealed(record: Json) -> bool:
    """Return whether a closing line, which no later line confirms, still matches its own digest."""
    unsealed = {**record, "data": {key: value for key, value in record["data"].items() if key != "seal"}}
    return bool(record["data"].get("seal") == hashlib.sha256(canonical(unsealed)).hexdigest())


def chain_lines(path: Path) -> tuple[tuple[Json, ...], tuple[str, ...]]:
    """Return every readable line of the chain of receipts, and what is wrong with the lines or their order.

    Raises a SetupError if the file cannot be read at all.
    """
    try:
        raw, torn = _split(path)
    except OSError as error:
        hint = "Give yourself read access to it; nothing can be checked against a chain that cannot be read."
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
    """Return the whole lines of a file, and whether something unfinished follows: no line end, or zeros."""
    *raw, rest = (read_regular(path) if path.exists() else b"").split(b"\n")
    zeroed = not rest and bool(raw) and b"\0" in raw[-1]
    return raw[:-1] if zeroed else raw, zeroed or bool(rest)


def _canonical_object(line: bytes) -> Json | None:
    """Return a JSON object that is written in the one canonical way, or None."""
    try:
        value = parse_object(line, numbers=AS_WRITTEN)
        return value if canonical(value) == line else None
    except ValueError:  # Malformed, or a number that is not finite.
        return None
