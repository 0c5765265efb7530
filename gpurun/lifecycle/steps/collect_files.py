"""Download the files that the instance lists as finished and that are not on this computer; verify each digest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial

from gpurun.core.errors import CollectFailed, GpurunError, TrainingFailed
from gpurun.core.journal_events import CollectIntended, CollectObserved, Incident, Json
from gpurun.core.journal_records import RunState
from gpurun.core.transfer_progress import moving
from gpurun.lifecycle.artifacts.downloader import Downloader
from gpurun.lifecycle.artifacts.inventory import (
    EgressBudget,
    Inventory,
    due_files,
    file_fields,
    newest_files,
    spare_files,
)
from gpurun.lifecycle.connect import Patience
from gpurun.lifecycle.context import Context, Note, get_instance
from gpurun.lifecycle.instance.job_folder import connect_to_folder
from gpurun.planning.budget import egress_of
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile
from gpurun.view.number_format import format_bytes, format_files

MOST_NAMED = 20
LEASE_OVER = "collect.lease_over"


def collect(state: RunState, context: Context) -> Iterator[Note]:
    """Download the wanted files into `artifacts/` and record them.

    A file counts only after its digest is verified on this computer. If the machine is gone, record the files that
    arrived before that, and its other finished files as missing. Raise if files are missing.
    """
    yield CollectIntended()
    started = context.clock.monotonic()
    instance, patience, inventory = get_instance(state), Patience(state, context), Inventory(context.folder)
    # The files of a cluster's job can be read after the job has ended.
    far = (state.shared and connect_to_folder(instance, context)) or context.reach(instance)
    manifest, gone = _read_manifest_or_last(far, inventory, patience, state)
    keep = context.plan.job.more_kept
    due, rest = due_files(manifest, keep), spare_files(manifest, keep)
    budget = EgressBudget.from_plan(context.folder, context.plan)
    budget.note(due)
    with far.many_lanes(), moving(context.folder, context.clock, "collect", sum(file.bytes for file in due)) as tell:

        def progress(_: ManifestFile, have_bytes: int) -> None:
            tell(downloads.here_bytes + have_bytes)

        downloads = Downloader(far, inventory, patience, context.clock, progress)
        downloads.gone = gone
        yield from _download_with_notes(downloads, due)
        if all(file.name in downloads.here for file in newest_files(manifest)):
            downloads.find(rest)
        else:
            yield from _download_with_notes(downloads, rest)
            budget.note(rest)
    done = {*downloads.here, *downloads.missing}
    unpublished = state.unpublished if gone is None else {}
    lost = [str(file["name"]) for file in unpublished.get("first", ())]
    missing_bytes = sum(file.bytes for file in (*due, *rest) if file.name in downloads.missing)
    # They are not needed if the latest checkpoint is on this computer.
    left = [file.name for file in rest if file.name not in done]
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
        **_count_egress(context, budget, downloads.repeated_bytes),
        **more,
    )
    if gone is not None or downloads.missing:
        raise gone or _as_collect_error(next(iter(downloads.missing.values())), downloads.missing, missing_bytes, state)


def _download_with_notes(downloads: Downloader, files: Sequence[ManifestFile]) -> Iterator[Note]:
    """Download files while the lease lasts. Yield an incident for each disk-full error, once."""
    noted: set[str] = set()
    for full in downloads.each(files):
        if full.what not in noted:
            noted.add(full.what)
            yield Incident(code=full.code, message=f"{full.what} {full.hint}")


def _as_collect_error(why: GpurunError, names: Collection[str], size_bytes: int, state: RunState) -> GpurunError:
    """Return a refusal or download error as a CollectFailed that names the missing files; others unchanged."""
    if not isinstance(why, FarRefusal | CollectFailed):
        return why
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    shown = ", ".join([*names][:MOST_NAMED]) + more
    what = f"{why.what} Not downloaded: {format_files(len(names))}, {format_bytes(size_bytes)} ({shown})."
    return CollectFailed(why.code, what if names else why.what, hint=_hint(why, state))


def _hint(why: GpurunError, state: RunState) -> str:
    """Return the error's hint. If the machine is held, add that `gpurun collect` may still download the files."""
    hint = "What was downloaded before is kept." if isinstance(why, FarRefusal) else why.hint
    is_held = state.hold_s and why.code != LEASE_OVER
    return f"{hint} While the machine is held: gpurun collect {state.run}" if is_held else hint


def _read_manifest_or_last(
    far: FarSide, inventory: Inventory, patience: Patience, state: RunState
) -> tuple[Manifest, TrainingFailed | None]:
    """Return the machine's list of finished files. If the machine is gone, return its last list and the error."""
    try:
        # Not limited by this disk's free space, which may grow later.
        manifest = patience.until_done(partial(far.manifest, MOST_ANNOUNCED_BYTES))
        with suppress(OSError):  # Only a restarted supervisor needs the stored list, so a full disk does not matter.
            inventory.remember(manifest)
        return inventory.with_whole(manifest), None
    except FarRefusal as refusal:
        raise _as_collect_error(refusal, (), 0, state) from refusal
    except TrainingFailed as gone:
        known = inventory.remembered()
        if known is None:
            raise
        return known, gone


def _count_egress(context: Context, budget: EgressBudget, repeated_bytes: int) -> Json:
    """Return the bytes that left the machine during the run, and their cost; {} if they are free."""
    if budget.limit_bytes is None:
        return {}
    sizes = [path.stat().st_size for path in (context.folder.log, context.folder.events) if path.exists()]
    left_bytes = budget.spent_bytes + repeated_bytes + sum(sizes)
    return {"left_bytes": left_bytes, "egress_micros": egress_of(context.plan.offer, left_bytes)}
