"""What a machine may push, and where; the package's docstring has the layout."""

from __future__ import annotations

from math import ceil

from gpurun.core.records import canonical
from gpurun.remote.s3.s3_client import Bucket

SLOTS = 128
LEAST_SLOT_BYTES = 64 << 20
MOST_SLOT_BYTES = 4 << 30
"""S3 takes no larger object in one request than 5 GiB."""
KEPT_CHECKPOINTS = 5
"""The latest two and the best are kept by the trainer; two more may be on their way in the place of those."""


def slot_bytes_for(checkpoint_bytes: int, more_kept: int = 0) -> int:
    """How large slots must be for all checkpoints that may be there at a time, with a quarter of the slots to spare."""
    wanted = ceil((KEPT_CHECKPOINTS + more_kept) * checkpoint_bytes / (SLOTS * 3 // 4))
    return min(MOST_SLOT_BYTES, max(LEAST_SLOT_BYTES, wanted))


def slot_key(folder: str, number: int) -> str:
    """The name of a slot below the run's folder in the bucket."""
    return f"{folder}/slot-{number:03d}"


def head_key(folder: str) -> str:
    """The name of the list of what is in the slots."""
    return f"{folder}/head"


def push_order(
    bucket: Bucket,
    folder: str,
    *,
    run: str,
    key: str,
    slot_bytes: int,
    seconds: float,
    most_bytes: int | None = None,
    steps: int = 1,
) -> bytes:
    """What the agent is given, a secret: presigned URLs that live for so long, and the key to sign the head with.

    Where each byte that leaves is charged, it pushes no more than `most_bytes`, spread over so many `steps`.
    """
    slots = [bucket.url_to_put(slot_key(folder, number), seconds).reveal() for number in range(SLOTS)]
    head = bucket.url_to_put(head_key(folder), seconds).reveal()
    limits = {"slot_bytes": slot_bytes, "most_bytes": most_bytes, "steps": steps}
    return canonical({"v": 1, "run": run, "key": key, **limits, "slots": slots, "head": head})
