"""Bring home what the instance announces as finished: each file by its digest, nothing that is here already."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from gpurun.core.errors import CollectFailed, StoreFull
from gpurun.core.paths import make_private
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.context import Context, Note, instance_of
from gpurun.machine.answers import ManifestFile
from gpurun.machine.far import FarSide


def collect(state: RunState, context: Context) -> Iterator[Note]:
    """Fetch every file of the manifest into `artifacts/`; a file counts only once its digest was checked here."""
    yield Event.COLLECT_INTENDED, {}
    started = context.clock.monotonic()
    far = context.reach(instance_of(state))
    limit_s = context.plan.lease.collect_s
    manifest = context.patiently(state, limit_s, lambda: far.manifest(_room_bytes(context)))
    here: list[ManifestFile] = []
    missing: list[tuple[str, CollectFailed]] = []
    for file in manifest.files:
        try:
            context.patiently(state, limit_s, partial(_bring, far, file, context.folder.artifacts))
            here.append(file)
        except StoreFull:
            raise  # What has come is kept; the driver tries again while the lease lasts.
        except CollectFailed as error:
            missing.append((file.name, error))
    yield (
        Event.COLLECT_OBSERVED,
        {
            "files": [file.model_dump(mode="json") for file in here],
            "missing": [name for name, _ in missing],
            "latest": manifest.latest,
            "best": manifest.best.model_dump(mode="json") if manifest.best else None,
            "seconds": round(context.clock.monotonic() - started, 3),
        },
    )
    if missing:
        raise missing[0][1]


def _bring(far: FarSide, file: ManifestFile, artifacts: Path) -> None:
    """Fetch one file; what is here with the right digest is not fetched again."""
    far.fetch(file.name, file.bytes, file.sha256, artifacts)


def _room_bytes(context: Context) -> int:
    """What this disk can take, besides what is here already."""
    artifacts = context.folder.artifacts
    make_private(artifacts)
    kept = sum(path.stat().st_size for path in artifacts.rglob("*") if path.is_file())
    return shutil.disk_usage(artifacts).free + kept
