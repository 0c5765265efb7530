"""Download the files of a machine that has ended: from the bucket to which it pushed, or from a cluster's folder."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from gpurun.core.collected_record import NAMED
from gpurun.core.errors import GpurunError
from gpurun.core.journal_events import Incident, Json, SalvageIntended, SalvageObserved
from gpurun.core.journal_records import RunState
from gpurun.ledger.journal import read_journal
from gpurun.lifecycle.artifacts.inventory import Inventory, file_fields, newest_files, spare_files
from gpurun.lifecycle.artifacts.on_demand import Salvaged, download_pushed_files
from gpurun.lifecycle.context import Context, Note, get_instance
from gpurun.lifecycle.instance.job_folder import bring_home
from gpurun.remote.messages import Manifest


def collect_pushed(state: RunState, context: Context) -> Iterator[Note]:
    """Download the files that are not here yet. A failure is recorded, not raised, because the machine is gone."""
    is_shared, place, is_whole = state.shared == "holds", state.pushed, True
    if is_shared and (address := get_instance(state).address) is not None:
        place = address.folder
    yield SalvageIntended(folder=place)
    started, found = context.clock.monotonic(), Salvaged(Manifest(), (), {}, (), 0)
    where = f"{place} on the cluster" if is_shared else "the bucket"
    try:
        if is_shared:
            found = bring_home(get_instance(state), context)
        else:
            found = download_pushed_files(context.folder, context.plan.choices.stage, place, context.clock)
    except GpurunError as error:
        is_whole = False
        yield Incident(code=error.code, message=f"nothing was downloaded from {where}: {error.what}")
    for name, why in islice(found.missing.items(), NAMED):
        yield Incident(code=why.code, message=f"{name} was not downloaded from {where}: {why.what}")
    if len(found.missing) > NAMED:
        more = f"{len(found.missing) - NAMED} more files were not downloaded from {where}"
        yield Incident(code="salvage.more", message=more)
    seconds = round(context.clock.monotonic() - started, 3)
    shared: Json = {}
    if is_shared:
        lacks_nothing = is_whole and not found.missing and not state.unpublished.get("files")
        shared = {"shared": "empty" if lacks_nothing else "kept"}
    at_home = _at_home(found, Inventory(context.folder))
    yield SalvageObserved(**at_home, seconds=seconds, brought=len(found.here), **shared)


def _at_home(found: Salvaged, inventory: Inventory) -> Json:
    """Return the record's fields about the files on this computer, whether just downloaded or earlier."""
    before = inventory.counted(read_journal(inventory.folder.journal).records)
    files = {str(file["name"]): file for file in before["files"]}
    files |= {file.name: file.as_json() for file in found.here}
    named = {*found.left_out, *(file.name for file in found.manifest.files)}
    is_newer = (found.manifest.latest or -1) >= (before["latest"] or 0)  # A newer list omits replaced files.
    lost = (name for name in before["missing"] if name in named or not is_newer)
    unlisted = (f"outputs/{file['name']}" for file in (before.get("unpublished") or {}).get("first", ()))
    missing = {*lost, *found.missing, *found.left_out, *unlisted} - files.keys()
    if all(file.name in files for file in newest_files(found.manifest)):  # The older checkpoints are not needed.
        missing -= {file.name for file in spare_files(found.manifest)}
    steps = [step for step in (before["latest"], found.manifest.latest) if step is not None]
    bests = [before["best"], found.manifest.best.model_dump(mode="json") if found.manifest.best else None]
    return {
        **file_fields(inventory.folder, [files[name] for name in sorted(files)], sorted(missing)),
        "latest": max(steps, default=None),  # Either list may be newer.
        "best": min(filter(None, bests), key=lambda best: float(best["val_loss"]), default=None),
    }
