"""Bring home from the bucket what a machine has pushed there: after its end, or whenever somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpurun.core.clock import Clock
from gpurun.core.errors import GpurunError
from gpurun.core.paths import RunFolder
from gpurun.core.progress import Event, RunState
from gpurun.ledger.journal import read_journal
from gpurun.lifecycle.bucket.push import key_of
from gpurun.lifecycle.context import Context, Note
from gpurun.lifecycle.home.stock import at_home_by
from gpurun.lifecycle.home.worth import newest, spare, wanted
from gpurun.lifecycle.settle import clear_all
from gpurun.machine.answers import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile
from gpurun.machine.bucket.address import parse_address
from gpurun.machine.bucket.patience import patiently
from gpurun.machine.bucket.pushed import Pushed, fetch_pushed, read_pushed
from gpurun.machine.bucket.wire import Bucket
from gpurun.machine.fetch import Wanted, noted_bytes

PATIENCE_S = 60.0

# Which files of a manifest are wanted.
Choose = Callable[[Manifest], Sequence[ManifestFile]]


@dataclass(frozen=True)
class Salvaged:
    """What a machine has pushed, which of its files are here now, and why others are not; `seq` counts its pushes."""

    manifest: Manifest
    here: tuple[ManifestFile, ...]
    missing: dict[str, GpurunError]
    left_out: tuple[str, ...]
    seq: int


def salvage(state: RunState, context: Context) -> Iterator[Note]:
    """Fetch what is in the bucket and not here. The machine is gone and paid for: what fails is noted, not raised."""
    yield from clear_all(state, context)  # A volume that was left would be billed as long as this takes.
    yield Event.SALVAGE_INTENDED, {"folder": state.pushed}
    started, found = context.clock.monotonic(), Salvaged(Manifest(), (), {}, (), 0)
    try:
        found = bring_pushed(context.folder, context.plan.choices.stage, state.pushed, context.clock)
    except GpurunError as error:
        yield Event.INCIDENT, {"code": error.code, "message": f"nothing came from the bucket: {error.what}"}
    for name, why in found.missing.items():
        yield Event.INCIDENT, {"code": why.code, "message": f"{name} did not come from the bucket: {why.what}"}
    seconds = round(context.clock.monotonic() - started, 3)
    yield Event.SALVAGE_OBSERVED, {**_at_home(found, context.folder), "seconds": seconds, "brought": len(found.here)}


def _at_home(found: Salvaged, folder: RunFolder) -> dict[str, object]:
    """What is at home now: what came from the bucket, and what had come before."""
    before = at_home_by(read_journal(folder.journal).records, folder)
    files = {str(one["name"]): one for one in before["files"]}
    files |= {one.name: one.model_dump(mode="json") for one in found.here}
    named = {*found.left_out, *(one.name for one in found.manifest.files)}
    is_newer = (found.manifest.latest or -1) >= (before["latest"] or 0)  # Then what it names no more was replaced.
    lost = (name for name in before["missing"] if name in named or not is_newer)
    missing = {*lost, *found.missing, *found.left_out} - files.keys()
    if all(one.name in files for one in newest(found.manifest)):  # The one before the latest is missed by nobody then.
        missing -= {one.name for one in spare(found.manifest)}
    steps = [step for step in (before["latest"], found.manifest.latest) if step is not None]
    bests = [before["best"], found.manifest.best.model_dump(mode="json") if found.manifest.best else None]
    return {
        "files": [files[name] for name in sorted(files)],
        "missing": sorted(missing),
        "latest": max(steps, default=None),  # Which of the two lists is the newer one depends on what was lost when.
        "best": min((one for one in bests if one), key=lambda one: float(one["val_loss"]), default=None),
    }


def bring_pushed(
    folder: RunFolder,
    url: str,
    place: str,
    clock: Clock,
    *,
    choose: Choose = lambda manifest: [*wanted(manifest), *spare(manifest)],
    tell: Callable[[ManifestFile, int], None] | None = None,
) -> Salvaged:
    """Fetch the chosen files of what lies at `place` (`RunState.pushed`) into the run's artifacts, digests verified.

    Without a choice all, the worthiest first. Nothing is taken that the run's key has not signed. Without anything
    there the manifest is empty. SetupError, BucketLost or CollectFailed when the list cannot be had.
    """
    bucket = Bucket(parse_address(url), clock)
    key = key_of(folder.push_key)
    patiently(clock, PATIENCE_S, bucket.look)
    read = partial(read_pushed, bucket, place, run=folder.name, key=key, most_bytes=MOST_ANNOUNCED_BYTES)
    pushed = patiently(clock, PATIENCE_S, read)
    if pushed is None:
        return Salvaged(Manifest(), (), {}, (), 0)
    here: list[ManifestFile] = []
    missing: dict[str, GpurunError] = {}
    for file in choose(pushed.manifest):
        try:
            bring, moved = partial(_bring, bucket, place, pushed, file, folder, tell), _moved(folder, file)
            patiently(clock, PATIENCE_S, bring, moved=moved)
            here.append(file)
        except GpurunError as error:
            missing[file.name] = error
    return Salvaged(pushed.manifest, tuple(here), missing, pushed.left_out, pushed.seq)


def _moved(folder: RunFolder, file: ManifestFile) -> Callable[[], int]:
    return partial(noted_bytes, folder.artifacts, file.sha256)


def _bring(
    bucket: Bucket,
    place: str,
    pushed: Pushed,
    file: ManifestFile,
    folder: RunFolder,
    tell: Callable[[ManifestFile, int], None] | None,
) -> None:
    on_progress = partial(tell, file) if tell is not None else None
    fetch_pushed(bucket, place, pushed, Wanted(file.name, file.bytes, file.sha256, on_progress), folder.artifacts)
