"""The audit's own code to read journals and the chain of receipts, strictly and byte by byte."""

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
    """The lines of a journal up to the first one that is not sound, and the sha256 of each.

    `problem` describes the line that is not sound, None if all are. `torn` means that the last line is unfinished.
    `hides_intent` means that the bytes from the bad line on contain an intent to request a machine. `is_linked` means
    that every whole line is canonical JSON and names the digest of the line before, even if a line is not sound.
    """

    records: tuple[Record, ...]
    digests: tuple[str, ...]
    problem: str | None
    torn: bool
    hides_intent: bool = False
    is_linked: bool = True


def journal_lines(path: Path) -> Lines:
    """Return the lines of a journal up to the first one that is not sound.

    A line is sound if it is in canonical form, has the right number, names the line before, and has all required fields
    of its event with the right types.
    """
    try:
        raw, torn = _split_lines(path)
    except OSError as error:
        return Lines((), (), f"the journal cannot be read: {error.strerror}", torn=False, is_linked=False)
    records: list[Record] = []
    digests: list[str] = []
    for number, line in enumerate(raw, start=1):
        try:
            records.append(_parse_record(line, number, digests[-1] if digests else GENESIS))
        except Malformed as error:
            is_hidden = any(f'"{Event.CREATE_INTENDED}"'.encode() in rest for rest in raw[number - 1 :])
            problem = f"journal line {number} {error}"
            return Lines(tuple(records), tuple(digests), problem, False, is_hidden, _is_linked(raw))
        digests.append(hashlib.sha256(line).hexdigest())
    return Lines(tuple(records), tuple(digests), None, torn)


def _parse_record(line: bytes, number: int, before: str) -> Record:
    """Return the record in a line; Malformed if the line is not sound."""
    written = _parse_canonical_object(line)
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
    """Return whether every line of a journal is a canonical JSON object and names the digest of the line before it."""
    befores = [GENESIS, *(hashlib.sha256(line).hexdigest() for line in raw)]
    written = [_parse_canonical_object(line) for line in raw]
    return all(line is not None and line.get("prev") == before for line, before in zip(written, befores, strict=False))


def _is_sealed(record: Json) -> bool:
    """Return whether a closing line matches the digest of itself (the seal), because no later line contains one."""
    unsealed = {**record, "data": {key: value for key, value in record["data"].items() if key != "seal"}}
    return bool(record["data"].get("seal") == hashlib.sha256(canonical(unsealed)).hexdigest())


def chain_lines(path: Path) -> tuple[tuple[Json, ...], tuple[str, ...]]:
    """Return the readable lines of the chain of receipts, and the problems with lines or order.

    Raise SetupError if the file cannot be read.
    """
    try:
        raw, torn = _split_lines(path)
    except OSError as error:
        hint = "Give yourself read access to it; nothing can be checked against a chain that cannot be read."
        raise SetupError("ledger.unreadable", f"{path} cannot be read: {error.strerror}.", hint=hint) from error
    links: list[Json] = []
    runs = set[str]()
    problems = ["the last line of the chain is torn; the next receipt that is written repairs it"] if torn else []
    before = GENESIS
    for number, line in enumerate(raw, start=1):
        link = _parse_canonical_object(line)
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


def _split_lines(path: Path) -> tuple[list[bytes], bool]:
    """Return the whole lines of a file, and whether an unfinished line follows: one without an end, or with zeros."""
    *raw, rest = (read_regular(path) if path.exists() else b"").split(b"\n")
    zeroed = not rest and bool(raw) and b"\0" in raw[-1]
    return raw[:-1] if zeroed else raw, zeroed or bool(rest)


def _parse_canonical_object(line: bytes) -> Json | None:
    """Return the JSON object in a line; None if the line is not an object in canonical form."""
    try:
        value = parse_object(line, numbers=AS_WRITTEN)
        return value if canonical(value) == line else None
    except ValueError:  # Malformed, or a number that is not finite.
        return None
