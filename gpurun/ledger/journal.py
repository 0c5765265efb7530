"""The journal of a run: what was intended and observed, chained line by line, and on disk before the next step.

docs/JOURNAL.md has the format. One process, which has the run's lock, writes a journal; readers need no lock.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpurun.core.clock import Clock, boot_id
from gpurun.core.crashpoint import crashpoint
from gpurun.core.errors import SetupError, VerificationFailed
from gpurun.core.journal_events import JournalEvent, JournalRepaired, may_be_damage
from gpurun.core.journal_records import Event, Record
from gpurun.core.paths import fsync_file, fsync_folder, make_private, read_regular
from gpurun.core.records import canonical
from gpurun.core.untrusted import AS_WRITTEN, Malformed, parse_object
from gpurun.ledger.fsync import append_durably, require_durable, unwritable_error
from gpurun.ledger.run_lock import RunLock, holder_of

__all__ = [
    "GENESIS",
    "Journal",
    "JournalDamaged",
    "JournalReading",
    "RunLock",
    "damaged_error",
    "holder_of",
    "is_noted",
    "newer_error",
    "read_journal",
    "require_durable",
    "seal_of",
]

GENESIS = "0" * 64
_PROSE = ("message", "hint", "reason")


class JournalDamaged(VerificationFailed):
    """A journal is damaged before its end. Its machines can still be ended, but the run spends nothing more."""


def damaged_error(path: Path, where: str) -> JournalDamaged:
    """Return the error for a run whose journal is damaged at `where`."""
    hint = (
        f"gpurun spends nothing more on it. End any machine that it may have left: gpurun destroy {path.parent.name}."
    )
    return JournalDamaged("journal.damaged", f"{path} is damaged at {where}.", hint=hint)


def newer_error(run: str, event: str) -> VerificationFailed:
    """Return the error for a run whose journal contains an event of a newer gpurun: nothing is rented for the run."""
    hint = f"Resume it with the newer gpurun, or end the run: gpurun destroy {run}."
    return VerificationFailed("journal.newer", f"A newer gpurun wrote {event} in the journal of {run}.", hint=hint)


@dataclass(frozen=True)
class JournalReading:
    """The content of a journal, as far as it can be trusted.

    `torn` is an unfinished last line, which never took effect. `damage` says where and how the journal is damaged; None
    if it is not. `good_bytes` is the length of the intact lines, from which `records` were read; `head` is the sha256
    of the last one. `hides_intent` says whether the bytes from the first bad line on contain an intent to request a
    machine.
    """

    records: tuple[Record, ...]
    torn: bytes
    damage: str | None
    good_bytes: int
    head: str
    hides_intent: bool = False


def read_journal(path: Path) -> JournalReading:
    """Read a journal up to an unfinished last line, or to the first damaged line; a missing journal has no records.

    Raise SetupError if the file cannot be read.
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise SetupError(
            "journal.unreadable",
            f"{path} cannot be read: {error.strerror}.",
            hint="Give yourself read access to it, or end any machine that the run may have left: `gpurun reap`.",
        ) from error
    *lines, rest = content.split(b"\n")
    if not rest and lines and b"\0" in lines[-1]:
        # A power cut can turn the middle of a line into zeros. The write of this line never returned.
        rest = lines.pop() + b"\n"
    records: list[Record] = []
    head, good_bytes = GENESIS, 0
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        why = record if isinstance(record, str) else _describe_chain_break(record, number, head)
        if why or isinstance(record, str):
            hides_intent = f'"{Event.CREATE_INTENDED}"'.encode() in content[good_bytes:]
            return JournalReading(tuple(records), b"", f"line {number}: {why}", good_bytes, head, hides_intent)
        records.append(record)
        head, good_bytes = hashlib.sha256(line).hexdigest(), good_bytes + len(line) + 1
    return JournalReading(tuple(records), rest, None, good_bytes, head)


def _parse(line: bytes) -> Record | str:
    """Return the record in a line or, as text, why the line is damaged."""
    where = ""
    try:
        record = Record.model_validate(parse_object(line, numbers=AS_WRITTEN))
        where = f"{record.event}: "
        if may_be_damage(record.event, record.data):
            _ = record.typed
        return record
    except ValidationError as error:
        first = error.errors()[0]
        return f"{where}{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
    except Malformed as error:
        return str(error)


def _describe_chain_break(record: Record, number: int, head: str) -> str | None:
    if record.seq != number:
        return f"its number is {record.seq}"
    if record.prev != head:
        return "it does not follow from the line before"
    return None


def seal_of(record: Mapping[str, Any]) -> str:
    """Return the seal of a closing line: the digest of the line without the seal. No later line has such a digest."""
    data = {key: value for key, value in record["data"].items() if key != "seal"}
    return hashlib.sha256(canonical({**record, "data": data})).hexdigest()


class Journal:
    """An open journal, and the only writer of its file. The caller holds the run's lock."""

    def __init__(self, path: Path, clock: Clock, reading: JournalReading) -> None:
        self._path = path
        self._clock = clock
        self._boot_id = boot_id()
        self._records = list(reading.records)
        self._head = reading.head
        self._length = reading.good_bytes

    @classmethod
    def open(cls, path: Path, clock: Clock) -> Journal:
        """Open a journal, or begin a new one. An unfinished last line is cut off, and the cut is recorded.

        Raise JournalDamaged, which names the line, if the journal is damaged before its end.
        """
        make_private(path.parent)
        reading = read_journal(path)
        if reading.damage is not None:
            raise damaged_error(path, reading.damage)
        journal = cls(path, clock, reading)
        if reading.torn:
            _truncate_file(path, reading.good_bytes)
            cut_sha256 = hashlib.sha256(reading.torn).hexdigest()
            journal.append(JournalRepaired(cut_bytes=len(reading.torn), cut_sha256=cut_sha256))
        return journal

    @property
    def records(self) -> tuple[Record, ...]:
        """Return all records, oldest first."""
        return tuple(self._records)

    @property
    def head(self) -> str:
        """Return the sha256 of the last line; 64 zeros for an empty journal."""
        return self._head

    def append(self, event: JournalEvent) -> Record:
        """Append a record for an event and return it in the form in which it is stored; it is then on disk.

        Raise SetupError if it cannot be written; then the journal is unchanged.
        """
        return self.write(event.event, event.as_data())

    def write(self, event: str, data: Mapping[str, Any]) -> Record:
        """Append a record from plain data and return it, as `append` does, for a caller that copies a record.

        Raise SetupError if it cannot be written; then the journal is unchanged.
        """
        crashpoint(f"before {event}")
        fields: dict[str, Any] = {
            "seq": len(self._records) + 1,
            "prev": self._head,
            "wall": round(self._clock.wall(), 6),
            "mono": round(self._clock.monotonic(), 6),
            "boot_id": self._boot_id,
            "event": str(event),
            "data": _convert_to_stored_form(self._path, data),
        }
        if event == Event.RUN_CLOSED:
            fields["data"]["seal"] = seal_of(fields)
        line = canonical(fields)
        record = Record.model_validate(json.loads(line))
        self._length = append_durably(self._path, line + b"\n", after=self._length)
        self._head = hashlib.sha256(line).hexdigest()
        self._records.append(record)
        crashpoint(f"after {event}")
        return record


def is_noted(path: Path, records: Iterable[Record], event: JournalEvent) -> bool:
    """Return whether the records contain the event, compared in the form in which the journal at `path` stores it."""
    stored = _convert_to_stored_form(path, event.as_data())
    return any(record.event is event.event and record.data == stored for record in records)


def _convert_to_stored_form(path: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    return _make_storable(_make_paths_relative(f"{path.parents[2]}/", data))


def _make_paths_relative(home: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with `home` removed from paths in messages, because others may see them in a receipt."""
    prose = {key: text.replace(home, "") for key in _PROSE if isinstance(text := data.get(key), str)}
    return {**data, **prose}


def _make_storable(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data as it is when read back from JSON; half a surrogate pair (an odd file name) becomes "?"."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    stored: dict[str, Any] = json.loads(text)
    return stored


def _truncate_file(path: Path, length: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, length)
            fsync_file(descriptor)
        finally:
            os.close(descriptor)
        fsync_folder(path.parent)
    except OSError as error:
        raise unwritable_error(path, error) from error
