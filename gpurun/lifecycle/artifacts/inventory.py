"""Find out by digest which files of a run are on this computer, and keep notes for later processes.

The notes are in `inventory.json` in the run's folder. An earlier gpurun wrote four files instead; they are read if
there is no `inventory.json`.
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
from gpurun.core.collected_record import COLLECTED, MISSING, MOST_BYTES, NAMED, missing_of, read_stated_files
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
from gpurun.remote.download import PARTIAL_FOLDER, WantedFile, has_content
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

# The kinds of a checkpoint's files; the most valuable has the lowest number. A command's checkpoint has only one kind.
# Weights without the state are of little use; the optimizer is needed only to continue training.
RANK = {"state": 0, "checkpoint": 0, "weights": 1, "optimizer": 2}
_BUCKET = "bucket"
LISTED = 1000
"""A journal record lists at most this many files itself; a longer list goes into a separate file."""


def file_fields(folder: RunFolder, files: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a journal record about the files that are on this computer and those that are missing.

    If a list is too long for a record, write it to a file in the run's folder. Raise OSError if it cannot be written.
    """
    fields: dict[str, Any] = {"files": list(files[:LISTED]), "missing": list(missing[:LISTED])}
    if len(files) > LISTED:
        lines = "".join(f"{f['sha256']} {f['bytes']} {f['kind']} {f['step']} {f['name']}\n" for f in by_name(files))
        fields["listed"] = {"files": len(files), "bytes": sum(int(file["bytes"]) for file in files)}
        fields["listed"] |= _write_list(folder, COLLECTED, lines)
    if len(missing) > NAMED:
        fields["missing_files"] = {"files": len(missing)}
        fields["missing_files"] |= _write_list(folder, MISSING, "".join(f"{name}\n" for name in sorted(missing)))
    return fields


def by_name(files: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the files sorted by name."""
    return sorted(files, key=lambda file: str(file["name"]))


def _write_list(folder: RunFolder, name: str, text: str) -> dict[str, str]:
    content = text.encode("ascii", "backslashreplace")
    write_atomic(folder.path / name, content)
    return {"sha256": hashlib.sha256(content).hexdigest()}


class Memory(BaseModel):
    """The content of `inventory.json`.

    - `manifest`: the machine's last list of finished files, written by an earlier gpurun only. Today the list is in
      `manifest.json`, because it may be long.
    - `files`: the files that were downloaded during training.
    - `whole` and `step`: the files and the step of the newest complete checkpoint among them.
    - `bytes_per_s`: the measured download speed.
    - `kept`: files that the user requested. Later checkpoints do not replace them.
    - `left`: for a machine whose egress is charged, the size by digest of each file that was requested from it; None if
      the notes cannot be read.
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
    """The files of one run on this computer. All processes share its notes on disk."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._path = folder.path / "inventory.json"
        self._listed = folder.path / "manifest.json"
        self._verified: dict[tuple[str, str], tuple[int, int, int]] = {}

    @property
    def artifacts(self) -> Path:
        """Return the folder with the files."""
        return self.folder.artifacts

    @cached_property
    def _plan(self) -> Plan | None:
        try:
            return Plan.model_validate_json(read_regular(self.folder.plan))
        except (OSError, ValueError):
            return None

    def require_planned(self, file: ManifestFile) -> None:
        """Raise CollectFailed if a file is larger than the plan allows for its kind."""
        most = self._plan.job.most_bytes(file.kind) if self._plan else None
        if most is not None and file.bytes > most:
            what = f"{file.name} is announced with {file.bytes:,} bytes; the planned model allows {most:,}."
            hint = "It was not downloaded: the machine, or a user of it, changed the file."
            raise CollectFailed("collect.not_as_planned", what, hint=hint)

    def has(self, file: ManifestFile) -> bool:
        """Return whether this file is on this computer and has the right digest."""
        path, known = locate_file(self.artifacts, file.name), self._verified.get((file.name, file.sha256))
        if known is not None and known == _stamp(path):  # This process has already computed its digest.
            return True
        before = _stamp(path)
        if before is None or not has_content(path, WantedFile(file.name, file.bytes, file.sha256)):
            return False
        self._verified[file.name, file.sha256] = before
        return True

    def put(self, file: ManifestFile, content: bytes) -> bool:
        """Store a small file if its digest is right; return whether it was stored.

        Call `os.sync` to make it durable.
        """
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
        """Return the notes. Without a file they are empty, or an earlier gpurun's; if unreadable, `left` is None."""
        try:
            return Memory.model_validate_json(read_regular(self._path, MOST_BYTES))
        except FileNotFoundError:
            return _read_old_memory(self.folder.path)
        except (OSError, ValueError):
            return Memory(left=None)

    @contextmanager
    def alone(self) -> Iterator[Memory]:
        """Yield the notes under a lock, so that no other process changes them during the block."""
        with exclusive(self.folder.path / ".inventory.lock"):
            yield self.memory

    def write(self, memory: Memory, **changes: object) -> None:
        """Write the notes with these changes. Raise OSError if the disk is full."""
        write_atomic(self._path, memory.model_copy(update=changes).model_dump_json().encode())

    def note(self, **changes: object) -> None:
        """Change these fields of the notes and keep the others."""
        with self.alone() as memory:
            self.write(memory, **changes)

    def keep(self, names: Iterable[str]) -> None:
        """Note that a user requested these files, so that they are kept."""
        with self.alone() as memory:
            self.write(memory, kept=tuple(sorted({*memory.kept, *names})))

    def remember(self, manifest: Manifest) -> None:
        """Store the machine's list of finished files. Raise OSError if the disk is full.

        Remove partial downloads of files that the machine has replaced, because they can never be completed.
        """
        forget_others(self.artifacts / PARTIAL_FOLDER, {file.sha256 for file in manifest.files})
        self.expect(manifest)
        with self.alone():
            write_atomic(self._listed, manifest.model_dump_json().encode())

    def expect(self, manifest: Manifest) -> None:
        """If this computer cannot store some of the names, prepare others for them (see `core.artifact_names`)."""
        if names := [file.name for file in manifest.files if file.name.startswith(ANY_NAME_BELOW)]:
            make_room_for_names(self.artifacts, names)

    def remembered(self) -> Manifest | None:
        """Return the machine's last list of finished files, completed by `with_whole`; None if it cannot be read."""
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
        """Return the manifest plus the downloaded files of the last complete checkpoint that it no longer lists."""
        names = {file.name for file in listed.files}
        more = [file for file in self.memory.whole if file.name not in names]
        here = [file for file in more if _size_of(locate_file(self.artifacts, file.name)) == file.bytes]
        return listed.model_copy(update={"files": (*listed.files, *here)})

    def counted(self, records: Sequence[Record]) -> dict[str, Any]:
        """Return what the collect step recorded. Without a record, return the files downloaded before, verified.

        The result has all files and all missing names, even if the record keeps them in separate files.
        """
        if (collected := last_typed(records, CollectObserved)) is None:
            return self._count_early(self.remembered() or Manifest())
        data = collected.as_data()
        with suppress(ValueError):
            files = read_stated_files(self.folder, collected.files, collected.listed)
            return {
                **data,
                "files": files,
                "missing": missing_of(self.folder, collected.missing, collected.missing_files),
            }
        return data

    def _count_early(self, manifest: Manifest) -> dict[str, Any]:
        here = {file.name: file for file in manifest.files if self.has(file)}
        due = due_files(manifest) if all(file.name in here for file in newest_files(manifest)) else manifest.files
        return {
            "files": [file.as_json() for file in here.values()],
            "missing": [file.name for file in due if file.name not in here],
            "latest": manifest.latest,
            "best": manifest.best.model_dump(mode="json") if manifest.best else None,
        }

    def take_stock(self) -> Iterator[JournalEvent]:
        """Record which files are on this computer, unless an earlier record does.

        There is no earlier record after `gpurun collect` followed by `gpurun destroy`, or if this computer slept until
        the lease was over.
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
        """Record, once, the local files from all of a run's machines. A file from several machines counts once."""
        records = read_journal(self.folder.journal).records
        last, intended = last_brought(records), last_typed(records, SalvageIntended)
        is_after_all = records[-1].event is Event.SALVAGE_OBSERVED
        if is_after_all and intended is not None and not intended.folder:
            return
        downloads = [record.typed for record in records if isinstance(record.typed, FilesBrought)]
        files: dict[str, Mapping[str, Any]] = {}
        for download in downloads:
            with suppress(ValueError):
                stated = read_stated_files(self.folder, download.files, download.listed)
                files |= {str(file["name"]): file for file in stated}
        manifest = self.remembered()
        files |= {file.name: file.as_json() for file in (manifest.files if manifest else ())}
        here = [file for _, file in sorted(files.items()) if self.has(ManifestFile(**file))]
        names, steps = {str(file["name"]) for file in here}, {file["step"] for file in here if file["kind"] in RANK}
        missing = [name for name in (last.missing if last else ()) if name not in names]
        if not here and not missing:
            return
        bests = [download.best for download in downloads if isinstance(download.best, dict)]
        yield SalvageIntended(folder="")
        yield SalvageObserved(
            **file_fields(self.folder, here, missing),
            latest=max(
                (done.latest for done in downloads if done.latest in steps), default=last.latest if last else None
            ),
            best=min(bests, key=lambda best: float(best["val_loss"]), default=None),
            seconds=0.0,
            brought=0,
        )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return the size and times of a file, which change when its content changes; None if it is not a regular file."""
    try:
        facts = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns) if stat.S_ISREG(facts.st_mode) else None


def _size_of(path: Path) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else -1  # Path.is_file raises if a folder is not readable.


def _read_old_memory(folder: Path) -> Memory:
    """Return the notes in the four files of an earlier gpurun, as far as they can be read."""
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


def newest_files(manifest: Manifest) -> list[ManifestFile]:
    """Return the files of the latest checkpoint."""
    return [file for file in manifest.files if file.kind in RANK and file.step == manifest.latest]


def due_files(manifest: Manifest, keep: int = 0) -> list[ManifestFile]:
    """Return the files to download: latest checkpoint, best one, all other kinds of files, then older checkpoints.

    At most `keep` older checkpoints are included, because each may cost money.
    """
    rest = {file.name for file in spare_files(manifest, keep)}
    best = manifest.best.step if manifest.best else None

    def place(file: ManifestFile) -> tuple[int, bool, int, int, str]:
        group = 2 if file.kind not in RANK else 0 if file.step == manifest.latest else 1 if file.step == best else 3
        is_large = group == 2 and file.bytes >= SMALL_BYTES  # Small files are downloaded together.
        return group, is_large, -file.step, RANK.get(file.kind, 0), file.name

    return sorted((file for file in manifest.files if file.name not in rest), key=place)


def spare_files(manifest: Manifest, keep: int = 0) -> list[ManifestFile]:
    """Return the older checkpoints, which are needed only if the latest is damaged, except the newest `keep`."""
    if not newest_files(manifest):
        return []
    needed = {manifest.latest, manifest.best.step if manifest.best else None}
    others = sorted({file.step for file in manifest.files if file.kind in RANK} - needed)
    return [file for file in manifest.files if file.kind in RANK and file.step in others[keep:]]


class EgressBudget:
    """Limits the bytes that leave a machine before its run ends.

    If the provider charges for egress, `limit_bytes` is what the plan pays for, to be spread over `steps` training
    steps; otherwise it is None, which means no limit. A request is noted before it is made, so that neither a crash nor
    a second process exceeds the limit.
    """

    def __init__(self, folder: RunFolder, limit_bytes: int | None, steps: int) -> None:
        self.limit_bytes = limit_bytes
        self._steps = steps
        self._inventory = Inventory(folder)

    @classmethod
    def from_plan(cls, folder: RunFolder, plan: Plan) -> EgressBudget:
        """Return the egress budget that a plan pays for."""
        limit_bytes = early_bytes(plan)
        return cls(folder, limit_bytes, max(1, plan.job.steps))

    def give_to_bucket(self) -> int | None:
        """Reserve the remaining budget for the bucket. Return how many bytes the machine may push; None means no limit.

        A second call returns the same number.
        """
        if self.limit_bytes is None:
            return None
        with self._inventory.alone() as memory:
            left = self._list_requested_bytes(memory)
            if _BUCKET not in left:
                left |= {_BUCKET: max(0, self.limit_bytes - sum(left.values()))}
                self._inventory.write(memory, left=left)
            return left[_BUCKET]

    @property
    def spent_bytes(self) -> int:
        """Return how many bytes have been requested so far."""
        return sum(self._list_requested_bytes(self._inventory.memory).values())

    def take(self, files: Iterable[ManifestFile], *, by_step: int | None = None) -> bool:
        """Return whether the budget allows these files now; if so, note them. A file that was noted before is free.

        With `by_step`, only the share of the budget that belongs to the steps up to `by_step` may be spent, so that
        downloads are spread over the training.
        """
        if self.limit_bytes is None:
            return True
        share = 1.0 if by_step is None else min(1.0, by_step / self._steps)
        with self._inventory.alone() as memory:
            left = self._list_requested_bytes(memory) | {file.sha256: file.bytes for file in files}
            if sum(left.values()) > self.limit_bytes * share:
                return False
            self._inventory.write(memory, left=left)
            return True

    def note(self, files: Iterable[ManifestFile]) -> None:
        """Note the files that are fetched at the end, if egress is charged. The plan pays for them separately."""
        if self.limit_bytes is None:
            return
        with self._inventory.alone() as memory:
            self._inventory.write(
                memory, left={file.sha256: file.bytes for file in files} | self._list_requested_bytes(memory)
            )

    def _list_requested_bytes(self, memory: Memory) -> dict[str, int]:
        """Return the requested bytes by digest. If the notes cannot be read, the whole budget counts as spent."""
        return dict(memory.left) if memory.left is not None else {"": self.limit_bytes or 0}
