"""Bring home what the instance announces as finished: each file by its digest, nothing that is here already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from gpurun.core.errors import CollectFailed, GpurunError, StoreFull, TrainingFailed
from gpurun.core.moving import Tell, moving
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.context import Context, Note, instance_of
from gpurun.lifecycle.home.at_home import is_here, remembered
from gpurun.lifecycle.home.worth import newest, spare, wanted
from gpurun.lifecycle.patience import Patience
from gpurun.machine.answers import Manifest, ManifestFile
from gpurun.machine.base import FarRefusal
from gpurun.machine.far import FarSide
from gpurun.machine.fetch import room_bytes


def collect(state: RunState, context: Context) -> Iterator[Note]:
    """Fetch what is worth it of the manifest into `artifacts/`; a file counts only once its digest was checked here.

    Of a machine that is gone, what had come home by then is recorded, and what it had finished besides as missing.
    """
    yield Event.COLLECT_INTENDED, {}
    started = context.clock.monotonic()
    far = context.reach(instance_of(state))
    patience = Patience(state, context)
    lost: GpurunError | None = None
    try:
        manifest = patience.until_done(lambda: far.manifest(room_bytes(context.folder.artifacts)))
        whole_bytes = sum(file.bytes for file in wanted(manifest))
        with far.many_lanes(), moving(context.folder, context.clock, "collect", whole_bytes) as tell:
            here, missing = _bring_all(wanted(manifest), far, state, context, tell, patience)
            if _needs_spare(manifest, here, context):
                more, lost_too = _bring_all(spare(manifest), far, state, context, tell, patience)
                here, missing = here + more, missing | lost_too
    except FarRefusal as refusal:
        raise _refused(refusal) from refusal
    except TrainingFailed as error:
        known = remembered(context.folder)
        if known is None:
            raise
        # It is gone with what was not home yet; what came home before is on record all the same.
        manifest, lost = known, error
        here, missing = _sorted_out([*wanted(known), *spare(known)], error, context)
    left = _left(manifest, here)
    missing = {name: why for name, why in missing.items() if name not in left}
    yield (
        Event.COLLECT_OBSERVED,
        {
            "files": [file.model_dump(mode="json") for file in here],
            "missing": list(missing),
            "latest": manifest.latest,
            "best": manifest.best.model_dump(mode="json") if manifest.best else None,
            "seconds": round(context.clock.monotonic() - started, 3),
            **({"left": left} if left else {}),
            **({"remembered": True} if lost is not None else {}),
        },
    )
    if lost is not None or missing:
        raise lost or next(iter(missing.values()))


def _needs_spare(manifest: Manifest, here: Sequence[ManifestFile], context: Context) -> bool:
    """Whether the checkpoint before the latest is worth its minutes: the latest is damaged, or some of it is here."""
    is_begun = any((context.folder.artifacts / file.name).exists() for file in spare(manifest))
    return is_begun or not _has_newest(manifest, here)


def _has_newest(manifest: Manifest, here: Sequence[ManifestFile]) -> bool:
    return all(file in here for file in newest(manifest))


def _left(manifest: Manifest, here: Sequence[ManifestFile]) -> list[str]:
    """The names of a spare checkpoint's files that stay there: with the latest at home nobody misses them."""
    if not _has_newest(manifest, here):
        return []
    return [file.name for file in spare(manifest) if file not in here]


def _bring_all(
    files: Sequence[ManifestFile], far: FarSide, state: RunState, context: Context, tell: Tell, patience: Patience
) -> tuple[list[ManifestFile], dict[str, GpurunError]]:
    """Fetch one file after the other: those that are here then, and why each of the others is not."""
    here: list[ManifestFile] = []
    missing: dict[str, GpurunError] = {}
    for place, file in enumerate(files):
        before_bytes = sum(one.bytes for one in files[:place])
        bring = partial(_bring, far, file, state, context, tell, before_bytes, patience)
        try:
            patience.until_done(bring)
            here.append(file)
        except StoreFull:
            raise  # What has come is kept; the driver tries again while the lease lasts.
        except FarRefusal as refusal:
            missing[file.name] = _refused(refusal)
        except CollectFailed as error:
            missing[file.name] = error
        except TrainingFailed as lost:  # It cannot be reached: what is here is recorded, the rest not waited for.
            also_here, gone = _sorted_out(files[place:], lost, context)
            return here + also_here, missing | gone
    return here, missing


def _sorted_out(
    files: Sequence[ManifestFile], lost: GpurunError, context: Context
) -> tuple[list[ManifestFile], dict[str, GpurunError]]:
    """Of a machine that was lost: the files that had come home before, and those that are lost with it."""
    here = [file for file in files if is_here(context.folder.artifacts, file)]
    return here, {file.name: lost for file in files if file not in here}


def _bring(
    far: FarSide,
    file: ManifestFile,
    state: RunState,
    context: Context,
    tell: Tell,
    before_bytes: int,
    patience: Patience,
) -> None:
    """Fetch one file, as long as the lease lasts; what is here with the right digest is not fetched again."""

    most_bytes = 0

    def go_on(have_bytes: int) -> None:
        nonlocal most_bytes
        if have_bytes > most_bytes:
            most_bytes = have_bytes
            patience.moved()
        tell(before_bytes + have_bytes)
        context.heed(state)
        if context.seconds_left(state) <= 0:
            what = f"The lease was over before {file.name} ({file.bytes:,} bytes) had come home."
            raise CollectFailed("collect.lease_over", what, hint="What came home before is kept. Give it more --hours.")

    go_on(0)
    far.fetch(file.name, file.bytes, file.sha256, context.folder.artifacts, on_progress=go_on)


def _refused(refusal: FarRefusal) -> CollectFailed:
    """What the far side would not give, or gave as nonsense, as what it means here: something did not come home."""
    return CollectFailed(refusal.code, refusal.what, hint="What came home before is kept, and the instance destroyed.")
