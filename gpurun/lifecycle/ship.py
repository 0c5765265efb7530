"""Send the trainer, the recipe and the shards; the far side checks every digest before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from gpurun.core.errors import SetupError
from gpurun.core.moving import moving
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.bucket.pull import pull
from gpurun.lifecycle.context import Context, Note, instance_of
from gpurun.lifecycle.patience import Patience
from gpurun.lifecycle.shipment import sources_of
from gpurun.machine.bucket.order import Pulled
from gpurun.machine.pack import Pack, survey


def ship(state: RunState, context: Context) -> Iterator[Note]:
    """Send the pack to the agent in parts; it is in place and verified there, or nothing of it is."""
    seen = survey(sources_of(context.plan, context.trainer))
    yield Event.SHIP_INTENDED, {"files": len(seen.files), "bytes": seen.total_bytes}
    _check_room(seen.total_bytes, state, disk_gb=int(context.plan.resolved["hardware"]["disk_gb"]))
    started = context.clock.monotonic()
    far = context.reach(instance_of(state))
    pack, pulled = Pack(seen), Pulled()  # Tried again, it sends only what the far side has not verified yet.
    yield from pull(state, context, far, pack, pulled)
    patience, there_most = Patience(state, context, limit_s=context.plan.lease.ship_s), 0
    if pulled.missing_bytes:  # What the bucket did not bring takes longer; training gives way to it.
        patience.limit_s += context.plan.lease.train_s
    with moving(context.folder, context.clock, "ship", seen.total_bytes) as tell:

        def on_progress(there_bytes: int) -> None:
            nonlocal there_most
            if there_bytes > there_most:
                there_most = there_bytes
                patience.moved()
            tell(there_bytes)
            context.heed(state)

        arrived = patience.until_done(lambda: far.unpack(pack, on_progress=on_progress, timeout_s=patience.left_s))
    seconds = round(context.clock.monotonic() - started, 3)
    told = {**arrived.model_dump(mode="json"), "sent_bytes": pack.sent_bytes, "seconds": seconds}
    if context.plan.choices.stage:
        told |= {"pulled_files": len(pulled.files), "pulled_bytes": pulled.sent_bytes}
    yield Event.SHIP_OBSERVED, told


def _check_room(size: int, state: RunState, *, disk_gb: int) -> None:
    """Refuse before the upload what would fill the far disk: with a tenth to spare, as it was when the agent looked."""
    free, needed = state.facts.get("disk_free_bytes"), size * 11 // 10
    if isinstance(free, int) and needed > free:
        ask_gb = disk_gb + ceil((needed - free) / 1e9)
        raise SetupError(
            "box.disk_small",
            f"The instance has {free / 1e9:.2f} GB free; what is shipped needs {needed / 1e9:.2f} GB.",
            hint=f"Ask for a larger disk: --set hardware.disk_gb={ask_gb}. On a machine of your own, make room.",
        )
