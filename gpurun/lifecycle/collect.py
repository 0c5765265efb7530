"""Bring home what the instance announces as finished: each file by its digest, nothing that is here already."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial

from gpurun.core.errors import CollectFailed, GpurunError, StoreFull, TrainingFailed
from gpurun.core.paths import make_private
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.context import Context, Note, instance_of
from gpurun.machine.answers import ManifestFile
from gpurun.machine.base import FarRefusal
from gpurun.machine.far import FarSide


def collect(state: RunState, context: Context) -> Iterator[Note]:
    """Fetch every file of the manifest into `artifacts/`; a file counts only once its digest was checked here."""
    yield Event.COLLECT_INTENDED, {}
    started = context.clock.monotonic()
    far = context.reach(instance_of(state))
    limit_s = context.plan.lease.collect_s
    try:
        manifest = context.patiently(state, limit_s, lambda: far.manifest(_room_bytes(context)))
    except FarRefusal as refusal:
        raise _refused(refusal) from refusal
    here: list[ManifestFile] = []
    missing: dict[str, GpurunError] = {}
    for place, file in enumerate(manifest.files):
        try:
            context.patiently(state, limit_s, partial(_bring, far, file, state, context))
            here.append(file)
        except StoreFull:
            raise  # What has come is kept; the driver tries again while the lease lasts.
        except FarRefusal as refusal:
            missing[file.name] = _refused(refusal)
        except CollectFailed as error:
            missing[file.name] = error
        except TrainingFailed as lost:  # It cannot be reached: what is here is recorded, the rest not waited for.
            missing |= {other.name: lost for other in manifest.files[place:]}
            break
    far.close_lanes()
    yield (
        Event.COLLECT_OBSERVED,
        {
            "files": [file.model_dump(mode="json") for file in here],
            "missing": list(missing),
            "latest": manifest.latest,
            "best": manifest.best.model_dump(mode="json") if manifest.best else None,
            "seconds": round(context.clock.monotonic() - started, 3),
        },
    )
    if missing:
        raise next(iter(missing.values()))


def _bring(far: FarSide, file: ManifestFile, state: RunState, context: Context) -> None:
    """Fetch one file, as long as the lease lasts; what is here with the right digest is not fetched again."""

    def go_on() -> None:
        context.heed(state)
        if context.seconds_left(state) <= 0:
            what = f"The lease was over before {file.name} ({file.bytes:,} bytes) had come home."
            raise CollectFailed("collect.lease_over", what, hint="What came home before is kept. Give it more --hours.")

    go_on()
    far.fetch(file.name, file.bytes, file.sha256, context.folder.artifacts, on_progress=lambda _: go_on())


def _refused(refusal: FarRefusal) -> CollectFailed:
    """What the far side would not give, or gave as nonsense, as what it means here: something did not come home."""
    return CollectFailed(refusal.code, refusal.what, hint="What came home before is kept, and the instance destroyed.")


def _room_bytes(context: Context) -> int:
    """What this disk can take, besides what is here already."""
    artifacts = context.folder.artifacts
    make_private(artifacts)
    kept = sum(path.stat().st_size for path in artifacts.rglob("*") if path.is_file())
    return shutil.disk_usage(artifacts).free + kept
