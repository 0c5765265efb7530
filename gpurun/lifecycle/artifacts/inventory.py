"""Which files of a run are on this computer, each by its digest, and what one process leaves on file for the next.

`inventory.json` in the run's folder is the only memory. Homes of an earlier gpurun have four files in its place, which
are read if there is no `inventory.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gpurun.core.artifact_names import make_room_for_names
from gpurun.core.collected_record import HERE, MISSING, MOST_BYTES, NAMED, missing_of, read_stated_files
from gpurun.core.errors import CollectFailed
from gpurun.core.filelock import exclusive
from gpurun.core.journal_events import (
    CollectObserved,
    FilesBrought,
    JournalEvent,
    SalvageIntended,
    SalvageObserved,
)
from gpurun.core.journal_records import Event, Record, last_brought, last_typed
from gpurun.core.paths import RunFolder, make_private, read_regular, write_atomic
from gpurun.core.run_plan import Plan
from gpurun.ledger.journal import read_journal
from gpurun.planning.transfer import early_bytes
from gpurun.remote.download import PARTIAL_FOLDER, WantedFile, holds
from gpurun.remote.interface import FarRefusal
from gpurun.remote.messages import (
    ANY_NAME_BELOW,
    MOST_ANNOUNCED_BYTES,
    Manifest,
    ManifestFile,
    locate_file,
    understood_manifest,
)
from gpurun.remote.resumable_file import forget_others
from gpurun.remote.small_files import SMALL_BYTES

# The files of a checkpoint; a command has only one kind. Without the state the weights are of little use; the
# optimizer is needed only to continue.
RANK = {"state": 0, "checkpoint": 0, "weights": 1, "optimizer": 2}
_BUCKET = "bucket"
LISTED = 1000
"""Up to this many files are listed in the record itself."""


def file_fields(folder: RunFolder, files: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> dict[str, Any]:
    """Return a record's fields about which files are here and which are missing; a long list goes to a file first.

    OSError if this disk does not take the list.
    """
    fields: dict[str, Any] = {"files": list(files[:LISTED]), "missing": list(missing[:LISTED])}
    if len(files) > LISTED:
        lines = "".join(f"{f['sha256']} {f['bytes']} {f['kind']} {f['step']} {f['name']}\n" for f in by_name(files))
        fields["listed"] = {"files": len(files), "bytes": sum(int(file["bytes"]) for file in files)}
        fields["listed"] |= _written(folder, HERE, lines)
    if len(missing) > NAMED:
        fields["missing_files"] = {"files": len(missing)}
        fields["missing_files"] |= _written(folder, MISSING, "".join(f"{name}\n" for name in sorted(missing)))
    return fields


def by_name(files: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the files in the order of their list."""
    return sorted(files, key=lambda file: str(file["name"]))


def _written(folder: RunFolder, name: str, text: str) -> dict[str, str]:
    content = text.encode("ascii", "backslashreplace")
    write_atomic(folder.path / name, content)
    return {"sha256": hashlib.sha256(content).hexdigest()}


class Memory(BaseModel):
    """The content of `inventory.json`.

    `manifest` is the machine's last list of finished files, as an earlier gpurun noted it; today it is in
    `manifest.json`, since it may be long. `files` were downloaded during training. Of the newest checkpoint among them,
    `whole` names the files and `step` the step; `bytes_per_s` is how fast the last one came. `kept` was requested by a
    user, and no later checkpoint replaces it here. `left` has by digest what was requested from a machine that charges
    for each byte; None if that is no longer known.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    manifest: dict[str, Any] | None = None
    step: int | None = None
    files: tuple[str, ...] = ()
    whole: tuple[ManifestFile, ...] = ()
    bytes_per_s: float | None = None
    kept: tuple[str, ...] = ()
    left: dict[str, int] | None = Field(default_factory=dict)


class Inventory:
    """The files of one run that are on this computer; all processes share what is noted of them."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._path = folder.path / "inventory.json"
        self._listed = folder.path / "manifest.json"
        self._verified: dict[tuple[str, str], tuple[int, int, int]] = {}

    @property
    def artifacts(self) -> Path:
        """The folder with the files."""
        return self.folder.artifacts

    @cached_property
    def _plan(self) -> Plan | None:
        try:
            return Plan.model_validate_json(read_regular(self.folder.plan))
        except (OSError, ValueError):
            return None

    def demand_planned(self, file: ManifestFile) -> None:
        """Raise CollectFailed for a file that is larger than its kind can be for the planned model."""
        most = self._plan.job.most_bytes(file.kind) if self._plan else None
        if most is not None and file.bytes > most:
            what = f"{file.name} is announced with {file.bytes:,} bytes; the planned model allows {most:,}."
            hint = "It was not downloaded: the machine, or a user of it, changed the file."
            raise CollectFailed("collect.not_as_planned", what, hint=hint)

    def has(self, file: ManifestFile) -> bool:
        """Return whether this very file is here, by its digest."""
        path, known = locate_file(self.artifacts, file.name), self._verified.get((file.name, file.sha256))
        if known is not None and known == _stamp(path):  # This process has already read its digest.
            return True
        before = _stamp(path)
        if before is None or not holds(path, WantedFile(file.name, file.bytes, file.sha256)):
            return False
        self._verified[file.name, file.sha256] = before
        return True

    def put(self, file: ManifestFile, content: bytes) -> bool:
        """Store a small file if its digest holds; only `sync` makes it durable. Return whether it was stored."""
        if len(content) != file.bytes or hashlib.sha256(content).hexdigest() != file.sha256:
            return False
        path, room = locate_file(self.artifacts, file.name), self.artifacts / PARTIAL_FOLDER
        part = room / f"{os.getpid()}.{threading.get_ident()}.part"
        make_private(room)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as out:
                out.write(content)
            make_private(path.parent)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        if (stamp := _stamp(path)) is not None:
            self._verified[file.name, file.sha256] = stamp
        return True

    @property
    def memory(self) -> Memory:
        """What is noted; empty without a note, `left=None` if it cannot be read."""
        try:
            return Memory.model_validate_json(read_regular(self._path, MOST_BYTES))
        except FileNotFoundError:
            return _memory_of_old(self.folder.path)
        except (OSError, ValueError):
            return Memory(left=None)

    @contextmanager
    def alone(self) -> Iterator[Memory]:
        """Yield what is noted, for a change: no other process makes one meanwhile."""
        with exclusive(self.folder.path / ".inventory.lock"):
            yield self.memory

    def write(self, memory: Memory, **changes: object) -> None:
        """Write the memory with these changes; OSError if the disk is full."""
        write_atomic(self._path, memory.model_copy(update=changes).model_dump_json().encode())

    def note(self, **changes: object) -> None:
        """Note these changes and keep the rest."""
        with self.alone() as memory:
            self.write(memory, **changes)

    def keep(self, names: Iterable[str]) -> None:
        """Note that a user requested these files."""
        with self.alone() as memory:
            self.write(memory, kept=tuple(sorted({*memory.kept, *names})))

    def remember(self, manifest: Manifest) -> None:
        """Note what the machine has finished so far; OSError if the disk is full.

        Partial downloads of files that were replaced there can never be completed: their space is freed.
        """
        forget_others(self.artifacts / PARTIAL_FOLDER, {file.sha256 for file in manifest.files})
        self.expect(manifest)
        with self.alone():
            write_atomic(self._listed, manifest.model_dump_json().encode())

    def expect(self, manifest: Manifest) -> None:
        """Note which of these files this computer cannot store under their names (`core.artifact_names`)."""
        if names := [file.name for file in manifest.files if file.name.startswith(ANY_NAME_BELOW)]:
            make_room_for_names(self.artifacts, names)

    def remembered(self) -> Manifest | None:
        """Return what the machine had finished when last heard, `with_whole`; None if it never sent a list."""
        try:
            content = read_regular(self._listed, MOST_BYTES)
        except OSError:
            noted = self.memory.manifest
            content = json.dumps(noted).encode() if noted else b""
        try:
            return self.with_whole(understood_manifest(content, MOST_ANNOUNCED_BYTES)) if content else None
        except FarRefusal:
            return None

    def with_whole(self, listed: Manifest) -> Manifest:
        """Return the manifest with the newest whole checkpoint here added: later ones may have replaced it there."""
        names = {file.name for file in listed.files}
        more = [file for file in self.memory.whole if file.name not in names]
        here = [file for file in more if _size_of(locate_file(self.artifacts, file.name)) == file.bytes]
        return listed.model_copy(update={"files": (*listed.files, *here)})

    def counted(self, records: Sequence[Record]) -> dict[str, Any]:
        """Return what the collect step recorded; without a record, the files downloaded before, each digest checked.

        Either way with all files and the names of all that are missing, however many there are.
        """
        if (collected := last_typed(records, CollectObserved)) is None:
            return self._counted_early(self.remembered() or Manifest())
        data = collected.as_data()
        with suppress(ValueError):
            files = read_stated_files(self.folder, collected.files, collected.listed)
            return {
                **data,
                "files": files,
                "missing": missing_of(self.folder, collected.missing, collected.missing_files),
            }
        return data

    def _counted_early(self, manifest: Manifest) -> dict[str, Any]:
        here = {file.name: file for file in manifest.files if self.has(file)}
        due = wanted(manifest) if all(file.name in here for file in newest(manifest)) else manifest.files
        return {
            "files": [file.as_json() for file in here.values()],
            "missing": [file.name for file in due if file.name not in here],
            "latest": manifest.latest,
            "best": manifest.best.model_dump(mode="json") if manifest.best else None,
        }

    def take_stock(self) -> Iterator[JournalEvent]:
        """Record which files are here, if no record has any.

        This is so after `gpurun collect` and `gpurun destroy`, or if the laptop's lid stayed closed until the lease was
        over.
        """
        records = read_journal(self.folder.journal).records
        if any(record.event in (Event.COLLECT_OBSERVED, Event.SALVAGE_OBSERVED) for record in records):
            return
        found = self.counted(records)
        if found["files"]:
            yield SalvageIntended(folder="")
            fields = {**found, **file_fields(self.folder, found["files"], found["missing"])}
            yield SalvageObserved(**fields, seconds=0.0, brought=0)

    def count_all_legs(self) -> Iterator[JournalEvent]:
        """Record the files here of all machines of a run, once; a file that a later machine sent again counts once."""
        records = read_journal(self.folder.journal).records
        last, intended = last_brought(records), last_typed(records, SalvageIntended)
        is_after_all = records[-1].event is Event.SALVAGE_OBSERVED
        if is_after_all and intended is not None and not intended.folder:
            return
        every = [record.typed for record in records if isinstance(record.typed, FilesBrought)]
        files: dict[str, Mapping[str, Any]] = {}
        for brought in every:
            with suppress(ValueError):
                stated = read_stated_files(self.folder, brought.files, brought.listed)
                files |= {str(file["name"]): file for file in stated}
        manifest = self.remembered()
        files |= {file.name: file.as_json() for file in (manifest.files if manifest else ())}
        here = [file for _, file in sorted(files.items()) if self.has(ManifestFile(**file))]
        names, steps = {str(file["name"]) for file in here}, {file["step"] for file in here if file["kind"] in RANK}
        missing = [name for name in (last.missing if last else ()) if name not in names]
        if not here and not missing:
            return
        bests = [listing.best for listing in every if isinstance(listing.best, dict)]
        yield SalvageIntended(folder="")
        yield SalvageObserved(
            **file_fields(self.folder, here, missing),
            latest=max(
                (listing.latest for listing in every if listing.latest in steps), default=last.latest if last else None
            ),
            best=min(bests, key=lambda best: float(best["val_loss"]), default=None),
            seconds=0.0,
            brought=0,
        )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file's content; None if it is not a regular file."""
    try:
        facts = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns) if stat.S_ISREG(facts.st_mode) else None


def _size_of(path: Path) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else -1  # Path.is_file raises if a folder may not be read.


def _memory_of_old(folder: Path) -> Memory:
    """Return what the four files of an earlier gpurun say, each as far as it can be read."""
    memory, fields = Memory(), dict[str, object]()
    with suppress(OSError, ValueError):
        memory = Memory.model_validate_json(read_regular(folder / "newest.json"))
    with suppress(OSError, ValueError, TypeError, RecursionError):
        fields["kept"] = tuple(map(str, json.loads(read_regular(folder / "kept.json"))))
    try:
        fields["left"] = {str(key): int(size) for key, size in json.loads(read_regular(folder / "left.json")).items()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        fields["left"] = None
    return memory.model_copy(update=fields)


def newest(manifest: Manifest) -> list[ManifestFile]:
    """Return the files of the latest checkpoint."""
    return [file for file in manifest.files if file.kind in RANK and file.step == manifest.latest]


def wanted(manifest: Manifest, keep: int = 0) -> list[ManifestFile]:
    """Return what to download, most valuable first: latest checkpoint, best one, samples and compile caches, others.

    Of other checkpoints at most `keep`, however many the machine lists: each may cost money.
    """
    rest = {file.name for file in spare(manifest, keep)}
    best = manifest.best.step if manifest.best else None

    def place(file: ManifestFile) -> tuple[int, bool, int, int, str]:
        group = 2 if file.kind not in RANK else 0 if file.step == manifest.latest else 1 if file.step == best else 3
        is_large = group == 2 and file.bytes >= SMALL_BYTES  # Small ones travel together.
        return group, is_large, -file.step, RANK.get(file.kind, 0), file.name

    return sorted((file for file in manifest.files if file.name not in rest), key=place)


def spare(manifest: Manifest, keep: int = 0) -> list[ManifestFile]:
    """Return what the trainer keeps in case the latest checkpoint is damaged: the one before it, unless wanted."""
    if not newest(manifest):
        return []
    needed = {manifest.latest, manifest.best.step if manifest.best else None}
    others = sorted({file.step for file in manifest.files if file.kind in RANK} - needed)
    return [file for file in manifest.files if file.kind in RANK and file.step in others[keep:]]


class EgressBudget:
    """What may leave a machine before its run ends: `limit_bytes` over a training of `steps`, None for no limit.

    If a provider charges for each byte, that is no more than the plan counts. A request is noted before it is made, so
    that neither a crash nor a second process can exceed it.
    """

    def __init__(self, folder: RunFolder, limit_bytes: int | None, steps: int) -> None:
        self.limit_bytes = limit_bytes
        self._steps = steps
        self._inventory = Inventory(folder)

    @classmethod
    def of(cls, folder: RunFolder, plan: Plan) -> EgressBudget:
        """Return the budget that a run's plan pays for."""
        limit_bytes = early_bytes(plan)
        return cls(folder, limit_bytes, max(1, plan.job.steps))

    def give_to_bucket(self) -> int | None:
        """Return how many bytes the machine may push, if that is charged: all that is left, which is then spent.

        None if nothing is charged. A second call returns the same.
        """
        if self.limit_bytes is None:
            return None
        with self._inventory.alone() as memory:
            left = self._left(memory)
            if _BUCKET not in left:
                left |= {_BUCKET: max(0, self.limit_bytes - sum(left.values()))}
                self._inventory.write(memory, left=left)
            return left[_BUCKET]

    @property
    def spent_bytes(self) -> int:
        """How many bytes were requested so far."""
        return sum(self._left(self._inventory.memory).values())

    def take(self, files: Iterable[ManifestFile], *, by_step: int | None = None) -> bool:
        """Return whether these files may be fetched now, and note them if so; a file noted before is free.

        With `by_step` only that share of the whole may be spent, so that checkpoints are spread over the training.
        """
        if self.limit_bytes is None:
            return True
        share = 1.0 if by_step is None else min(1.0, by_step / self._steps)
        with self._inventory.alone() as memory:
            left = self._left(memory) | {file.sha256: file.bytes for file in files}
            if sum(left.values()) > self.limit_bytes * share:
                return False
            self._inventory.write(memory, left=left)
            return True

    def note(self, files: Iterable[ManifestFile]) -> None:
        """Count the files fetched at the end, if egress is charged; the plan paid for them, so nothing is limited."""
        if self.limit_bytes is None:
            return
        with self._inventory.alone() as memory:
            self._inventory.write(memory, left={file.sha256: file.bytes for file in files} | self._left(memory))

    def _left(self, memory: Memory) -> dict[str, int]:
        """Return what was requested, by digest; a note that cannot be read counts as everything."""
        return dict(memory.left) if memory.left is not None else {"": self.limit_bytes or 0}
