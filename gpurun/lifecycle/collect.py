"""Bring home what the instance announces as finished: each file by its digest, nothing that is here already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from gpurun.core.errors import TrainingFailed
from gpurun.core.moving import moving
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.context import Context, Note, instance_of
from gpurun.lifecycle.home.at_home import remember, remembered, with_whole
from gpurun.lifecycle.home.bringing import Bringing, refused
from gpurun.lifecycle.home.worth import newest, spare, wanted
from gpurun.lifecycle.patience import Patience
from gpurun.machine.answers import MOST_ANNOUNCED_BYTES, Manifest
from gpurun.machine.base import FarRefusal
from gpurun.machine.far import FarSide


def collect(state: RunState, context: Context) -> Iterator[Note]:
    """Fetch what is worth it of the manifest into `artifacts/`; a file counts only once its digest was checked here.

    Of a machine that is gone, what had come home by then is recorded, and what it had finished besides as missing.
    """
    yield Event.COLLECT_INTENDED, {}
    started = context.clock.monotonic()
    far, patience = context.reach(instance_of(state)), Patience(state, context)
    manifest, gone = _listed(far, context, patience)
    whole_bytes = sum(file.bytes for file in wanted(manifest))
    with far.many_lanes(), moving(context.folder, context.clock, "collect", whole_bytes) as tell:
        bringing = Bringing(far, state, context, patience, tell)
        bringing.gone = gone
        yield from bringing.bring(wanted(manifest))
        if _has_newest(manifest, bringing):
            bringing.find(spare(manifest))
        else:
            yield from bringing.bring(spare(manifest))
    left = _left(manifest, bringing)
    yield (
        Event.COLLECT_OBSERVED,
        {
            "files": [file.model_dump(mode="json") for file in bringing.here.values()],
            "missing": list(bringing.missing),
            "latest": manifest.latest,
            "best": manifest.best.model_dump(mode="json") if manifest.best else None,
            "seconds": round(context.clock.monotonic() - started, 3),
            **({"left": left} if left else {}),
            **({"remembered": True} if gone is not None else {}),
        },
    )
    if gone is not None or bringing.missing:
        raise gone or next(iter(bringing.missing.values()))


def _listed(far: FarSide, context: Context, patience: Patience) -> tuple[Manifest, TrainingFailed | None]:
    """What is finished over there; of a machine that is gone, what it told last, and the error that says so."""
    try:
        # Not bounded by the room here: what fits is brought, and for the rest there may be room later.
        manifest = patience.until_done(partial(far.manifest, MOST_ANNOUNCED_BYTES))
        with suppress(OSError):  # Only for a later life of this process; a full disk is waited for elsewhere.
            remember(context.folder, manifest)
        return with_whole(context.folder, manifest), None
    except FarRefusal as refusal:
        raise refused(refusal) from refusal
    except TrainingFailed as gone:
        known = remembered(context.folder)
        if known is None:
            raise
        return known, gone


def _has_newest(manifest: Manifest, bringing: Bringing) -> bool:
    return all(file.name in bringing.here for file in newest(manifest))


def _left(manifest: Manifest, bringing: Bringing) -> list[str]:
    """The names of a spare checkpoint's files that stay there: with the latest at home nobody misses them."""
    told = {*bringing.here, *bringing.missing}
    return [file.name for file in spare(manifest) if file.name not in told]
