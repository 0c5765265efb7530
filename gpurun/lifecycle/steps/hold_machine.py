"""Hold a machine for a while if ending it would lose finished files that are not on this computer yet.

A hold uses the time that is left in the lease: it reserves nothing and changes neither the deadline nor the machine's
guard. The end of the hold is recorded, so that a restarted supervisor does not hold longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpurun.core.collected_record import missing_of, read_stated_files
from gpurun.core.errors import GpurunError
from gpurun.core.journal_events import CollectObserved, HoldIntended, HoldObserved, Json
from gpurun.core.journal_records import RunState, last_typed
from gpurun.ledger.journal import read_journal
from gpurun.ledger.run_state import is_lacking
from gpurun.lifecycle.artifacts.inventory import Inventory, due_files, file_fields
from gpurun.lifecycle.context import Context, Note, get_instance
from gpurun.remote.interface import MachineLost
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, ManifestFile
from gpurun.view.number_format import format_bytes, format_files

LOOK_S, CALL_S = 2.0, 30.0
MARGIN_S = 2.0
"""Seconds between the end of a hold and that of the lease, so that the hold does not end as a lease does."""
_MOST_NAMED = 20
_FILE_FIELDS = ("files", "missing", "listed", "missing_files", "missing_bytes")


def hold(state: RunState, context: Context) -> Iterator[Note]:
    """Hold the machine until all missing files have arrived, the hold's time is over, or the machine no longer runs."""
    missing = _MissingFiles.from_records(state, context)
    if state.held_at is None:
        left_s = max(0.0, min(state.hold_s, context.seconds_left(state) - MARGIN_S))
        yield HoldIntended(until_wall=round(context.clock.wall() + left_s, 3), **missing.as_fields(state))
    started_mono, call_mono, how = context.clock.monotonic(), float("-inf"), "over"
    while (left_s := context.hold_left_s(state)) > 0:
        context.raise_if_stopped(state)
        if (collected := missing.make_collect_record()) is not None:
            yield collected
            missing = _MissingFiles.from_records(state, context)
            if not state.elsewhere:
                how = "home"
                break
        if context.clock.monotonic() - call_mono >= CALL_S:
            call_mono = context.clock.monotonic()
            if _is_gone(state, context):
                how = "gone"
                break
            missing = missing.listed(state, context)
        context.clock.sleep(min(left_s, LOOK_S))
    yield HoldObserved(how=how, seconds=round(context.clock.monotonic() - started_mono, 3))


def _is_gone(state: RunState, context: Context) -> bool:
    """Return whether the machine no longer runs. This poll also shows the agent that a client is alive."""
    try:
        context.reach(get_instance(state)).poll({})
    except MachineLost:
        return bool(context.is_down(state))
    except GpurunError:
        return False
    return False


@dataclass(frozen=True)
class _MissingFiles:
    """The finished files on the machine that are not on this computer.

    `names` has the names of all of them; `files` are those that can still be downloaded.
    """

    collected: CollectObserved | None
    files: tuple[ManifestFile, ...]
    names: tuple[str, ...]
    inventory: Inventory
    here: set[str] = field(default_factory=set)
    """Names of files that have arrived since. They are stored so that each digest is computed only once."""

    @classmethod
    def from_records(cls, state: RunState, context: Context) -> _MissingFiles:
        """Return the missing files, from the record of the collect step and the machine's last list."""
        records = read_journal(context.folder.journal).records
        collected, inventory = last_typed(records, CollectObserved), Inventory(context.folder)
        announced = {file.name: file for file in getattr(inventory.remembered(), "files", ())}
        names = tuple(missing_of(context.folder, collected.missing, collected.missing_files)) if collected else ()
        files = tuple(announced[name] for name in names if name in announced)
        return cls(collected, files, names, inventory)

    def listed(self, state: RunState, context: Context) -> _MissingFiles:
        """Return the files on the machine's list if the collect step left no record, else self."""
        if self.collected:
            return self
        try:
            manifest = context.reach(get_instance(state)).manifest(MOST_ANNOUNCED_BYTES)
        except GpurunError:
            return self
        files = tuple(due_files(manifest, context.plan.job.more_kept))
        best = manifest.best.model_dump(mode="json") if manifest.best else None
        none_yet = CollectObserved(files=[], missing=[], latest=manifest.latest, best=best, seconds=0.0)
        return _MissingFiles(none_yet, files, tuple(file.name for file in files), self.inventory)

    def as_fields(self, state: RunState) -> Json:
        """Return the record's fields about the files for which the machine is held."""
        size = sum(file.bytes for file in self.files)
        count = max(len(self.names), int(state.unpublished.get("files", 0)))
        what = []
        if is_lacking(state):
            named = f", {format_bytes(size)}" if size else ""
            what.append(f"{format_files(count)}{named} not downloaded" if count else "its files were not downloaded")
        if state.elsewhere:
            lies = "lies" if state.elsewhere == 1 else "lie"
            what.append(f"{format_files(state.elsewhere)} {lies} outside of the folders that are downloaded")
        cure = f"gpurun collect {state.run} fetches what it can and names the rest; gpurun destroy {state.run} ends it"
        return {"files": count, "bytes": size, "first": list(self.names[:_MOST_NAMED]), "elsewhere": state.elsewhere,
                "message": f"{', and '.join(what)}: {cure}"}  # fmt: skip

    def make_collect_record(self) -> CollectObserved | None:
        """Return a new collect record once every missing file has arrived; otherwise, or if none was missing, None."""
        for file in self.files:
            if file.name not in self.here and self.inventory.has(file):
                self.here.add(file.name)
        collected = self.collected
        if collected is None or not self.names or self.here != {*self.names}:
            return None
        folder = self.inventory.folder
        files = [
            *read_stated_files(folder, collected.files, collected.listed),
            *(file.as_json() for file in self.files),
        ]
        rest = {key: value for key, value in collected.as_data().items() if key not in _FILE_FIELDS}
        return CollectObserved(**rest, **file_fields(folder, files, []))
