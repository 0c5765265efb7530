"""The objects that a machine may push to a bucket; the package's docstring has the layout."""

from __future__ import annotations

from math import ceil

from gpurun.core.records import canonical
from gpurun.remote.s3.s3_client import Bucket

SLOTS = 128
LEAST_SLOT_BYTES = 64 << 20
MOST_SLOT_BYTES = 4 << 30
"""S3's limit for an object in one request is 5 GiB."""
KEPT_CHECKPOINTS = 5
"""The trainer keeps the two latest checkpoints and the best one; two more may be replacing them."""


def slot_bytes_for(checkpoint_bytes: int, more_kept: int = 0) -> int:
    """Return the bytes per slot, so that all checkpoints that exist at a time fit into three quarters of the slots."""
    needed_bytes = ceil((KEPT_CHECKPOINTS + more_kept) * checkpoint_bytes / (SLOTS * 3 // 4))
    return min(MOST_SLOT_BYTES, max(LEAST_SLOT_BYTES, needed_bytes))


def slot_key(folder: str, number: int) -> str:
    """Return the name of a slot in the run's folder in the bucket."""
    return f"{folder}/slot-{number:03d}"


def head_key(folder: str) -> str:
    """Return the name of the list of the slots' contents."""
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
    """Return the agent's push order, a secret: presigned URLs valid for `seconds`, and the key that signs the head.

    If transfers cost money, the agent pushes at most `most_bytes`, spread over `steps`.
    """
    slots = [bucket.url_to_put(slot_key(folder, number), seconds).reveal() for number in range(SLOTS)]
    head = bucket.url_to_put(head_key(folder), seconds).reveal()
    limits = {"slot_bytes": slot_bytes, "most_bytes": most_bytes, "steps": steps}
    return canonical({"v": 1, "run": run, "key": key, **limits, "slots": slots, "head": head})
