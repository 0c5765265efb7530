"""Sending a pack: in parts, over several lanes at once, and of it only what is not there already, verified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from gpurun.core.clock import Clock, SystemClock
from gpurun.machine.answers import Shipped, understood
from gpurun.machine.base import FarRefusal
from gpurun.machine.pack import Codec, Pack, PackedFile, blocks
from gpurun.machine.parts import Parts
from gpurun.machine.sending import Asks, Sending


def send(
    far: Asks,
    pack: Pack,
    codec: Codec,
    *,
    on_progress: Callable[[int], None] | None = None,
    timeout_s: float,
    clock: Clock | None = None,
) -> Shipped:
    """Send what the far side does not have; all of it is in place and verified there, or nothing of it is.

    `on_progress` is told the content bytes that are there or were sent; what it raises ends the sending.
    """
    pack.survey.demand_clean()
    clock = clock or SystemClock()
    end_mono = clock.monotonic() + timeout_s
    parts = Parts(pack.survey.files, pack.known)
    sending = Sending(far, pack, parts, codec, clock, end_mono)
    sending.send("ask", on_progress)
    if sending.held:
        parts = Parts(_not_held(pack, sending.held), pack.known)
        sending = Sending(far, pack, parts, codec, clock, end_mono)
        sending.send("settled", on_progress)
    all_there_mono = clock.monotonic()
    try:
        shipped = understood(Shipped, sending.settling.finish())
    finally:
        sending.settling.end()
    if shipped.manifest_sha256 != pack.manifest_sha256:
        raise FarRefusal("nonsense", "The instance says that it has taken in another pack than the one sent.")
    return shipped.model_copy(update={"unpack_s": round(clock.monotonic() - all_there_mono, 3)})


def _not_held(pack: Pack, held: set[str]) -> list[PackedFile]:
    """The files that the far side does not have; to know that, those are read that could be among what it has."""
    for file in pack.survey.files:
        if file.name not in pack.known:
            digest = hashlib.sha256()
            for block in blocks(file):
                digest.update(block)
            pack.known[file.name] = digest.hexdigest()
    return [file for file in pack.survey.files if pack.known[file.name] not in held]
