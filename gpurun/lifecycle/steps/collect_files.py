"""Download what the instance lists as finished: each file by its digest, and none that is here already."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial

from gpurun.core.errors import CollectFailed, GpurunError, TrainingFailed
from gpurun.core.journal_events import CollectIntended, CollectObserved, Incident, Json
from gpurun.core.journal_records import RunState
from gpurun.core.transfer_progress import moving
from gpurun.lifecycle.artifacts.downloader import Downloader
from gpurun.lifecycle.artifacts.inventory import EgressBudget, Inventory, file_fields, newest, spare, wanted
from gpurun.lifecycle.connect import Patience
from gpurun.lifecycle.context import Context, Note, get_instance
from gpurun.lifecycle.instance.job_folder import folder_way
from gpurun.planning.budget import egress_of
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile
from gpurun.view.number_format import format_bytes, format_files

MOST_NAMED = 20
LEASE_OVER = "collect.lease_over"


def collect(state: RunState, context: Context) -> Iterator[Note]:
    """Fetch the wanted files of the manifest into `artifacts/`; a file counts only once its digest is checked here.

    If the machine is gone, record the files that had come by then, and the others that it had finished as missing.
    """
    yield CollectIntended()
    started = context.clock.monotonic()
    instance, patience, inventory = get_instance(state), Patience(state, context), Inventory(context.folder)
    # A job's files do not need the job: it may be over.
    far = (state.shared and folder_way(instance, context)) or context.reach(instance)
    manifest, gone = _listed(far, inventory, patience, state)
    keep = context.plan.job.more_kept
    due, rest = wanted(manifest, keep), spare(manifest, keep)
    budget = EgressBudget.of(context.folder, context.plan)
    budget.note(due)
    with far.many_lanes(), moving(context.folder, context.clock, "collect", sum(file.bytes for file in due)) as tell:

        def progress(_: ManifestFile, have_bytes: int) -> None:
            tell(downloads.here_bytes + have_bytes)

        downloads = Downloader(far, inventory, patience, context.clock, progress)
        downloads.gone = gone
        yield from _no_room(downloads, due)
        if all(file.name in downloads.here for file in newest(manifest)):
            downloads.find(rest)
        else:
            yield from _no_room(downloads, rest)
            budget.note(rest)
    done = {*downloads.here, *downloads.missing}
    unpublished = state.unpublished if gone is None else {}
    lost = [str(file["name"]) for file in unpublished.get("first", ())]
    missing_bytes = sum(file.bytes for file in (*due, *rest) if file.name in downloads.missing)
    left = [file.name for file in rest if file.name not in done]  # With the latest one here they are not needed.
    more: Json = {"left": left} if left else {}
    more |= {"missing_bytes": missing_bytes + unpublished.get("bytes", 0)} if downloads.missing or lost else {}
    more |= {"unpublished": unpublished} if unpublished else {}
    more |= {"remembered": True} if gone is not None else {}
    files = [file.as_json() for file in downloads.here.values()]
    missing = [*downloads.missing, *(name for name in lost if name not in downloads.missing)]
    yield CollectObserved(
        **file_fields(context.folder, files, missing),
        latest=manifest.latest,
        best=manifest.best.model_dump(mode="json") if manifest.best else None,
        seconds=round(context.clock.monotonic() - started, 3),
        **_egress(context, budget, downloads.again_bytes),
        **more,
    )
    if gone is not None or downloads.missing:
        raise gone or _failed(next(iter(downloads.missing.values())), downloads.missing, missing_bytes, state)


def _no_room(downloads: Downloader, files: Sequence[ManifestFile]) -> Iterator[Note]:
    """Download files while the lease lasts; note each disk-full error once."""
    noted: set[str] = set()
    for full in downloads.each(files):
        if full.what not in noted:
            noted.add(full.what)
            yield Incident(code=full.code, message=f"{full.what} {full.hint}")


def _failed(why: GpurunError, names: Collection[str], size_bytes: int, state: RunState) -> GpurunError:
    """Return a far side's refusal or nonsense as the error that it means here: files were not downloaded."""
    if not isinstance(why, FarRefusal | CollectFailed):
        return why
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    shown = ", ".join([*names][:MOST_NAMED]) + more
    what = f"{why.what} Not downloaded: {format_files(len(names))}, {format_bytes(size_bytes)} ({shown})."
    return CollectFailed(why.code, what if names else why.what, hint=_hint(why, state))


def _hint(why: GpurunError, state: RunState) -> str:
    """Return what to do: while the machine is held, a collect may still fetch the files."""
    hint = "What was downloaded before is kept." if isinstance(why, FarRefusal) else why.hint
    is_held = state.hold_s and why.code != LEASE_OVER
    return f"{hint} While the machine is held: gpurun collect {state.run}" if is_held else hint


def _listed(
    far: FarSide, inventory: Inventory, patience: Patience, state: RunState
) -> tuple[Manifest, TrainingFailed | None]:
    """Return what is finished there; if the machine is gone, its last list, and the error that says so."""
    try:
        # Not limited by the room here: what fits is downloaded, and there may be room for the rest later.
        manifest = patience.until_done(partial(far.manifest, MOST_ANNOUNCED_BYTES))
        with suppress(OSError):  # Only a restarted supervisor needs it; a full disk is waited for elsewhere.
            inventory.remember(manifest)
        return inventory.with_whole(manifest), None
    except FarRefusal as refusal:
        raise _failed(refusal, (), 0, state) from refusal
    except TrainingFailed as gone:
        known = inventory.remembered()
        if known is None:
            raise
        return known, gone


def _egress(context: Context, budget: EgressBudget, again_bytes: int) -> Json:
    """Return what left the machine over the whole run, and its cost, if the provider charges for it."""
    if budget.limit_bytes is None:
        return {}
    sizes = [path.stat().st_size for path in (context.folder.log, context.folder.events) if path.exists()]
    left_bytes = budget.spent_bytes + again_bytes + sum(sizes)
    return {"left_bytes": left_bytes, "egress_micros": egress_of(context.plan.offer, left_bytes)}
