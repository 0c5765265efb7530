"""Reads what a machine has pushed to a bucket. Nothing is trusted that is not signed with the run's own key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gpurun.core.errors import CollectFailed
from gpurun.remote.download import WantedFile, fetch
from gpurun.remote.interface import FarRefusal, MachineLost, Take
from gpurun.remote.machine_facts import Count, Text
from gpurun.remote.messages import (
    MOST_MANIFEST_FILES,
    Manifest,
    ManifestFile,
    Name,
    demand_sound,
    parse_message,
)
from gpurun.remote.s3.push_slots import SLOTS, head_key, slot_key
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_errors import BucketLost
from gpurun.remote.small_files import Cutter, TakeFile

MOST_HEAD_BYTES = 512 << 20

Place = Annotated[tuple[Annotated[int, Field(ge=0, lt=SLOTS)], Count, Count], Field()]


class _Head(BaseModel):
    """The content of the slots. `manifest` is the trainer's manifest, reduced to the files that are in slots."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    v: Literal[1]
    seq: Count
    run: Text
    left_out: Annotated[tuple[Name, ...], Field(max_length=MOST_MANIFEST_FILES)]
    places: dict[str, Annotated[tuple[Place, ...], Field(max_length=SLOTS)]]
    manifest: Manifest


@dataclass(frozen=True)
class Pushed:
    """The complete files in the bucket: their manifest, their places, and the names of files that did not fit."""

    manifest: Manifest
    places: Mapping[str, tuple[tuple[int, int, int], ...]]
    left_out: tuple[str, ...]
    seq: int


def read_pushed(bucket: Bucket, folder: str, *, run: str, key: str, most_bytes: int) -> Pushed | None:
    """Return what a run has pushed; None if it has pushed nothing.

    `most_bytes` is the limit of the local disk. Raise CollectFailed if the list is invalid, or was not signed by the
    run's machine.
    """
    content = bucket.get(head_key(folder), MOST_HEAD_BYTES)
    if content is None:
        return None
    mark, _, body = content.partition(b"\n")
    if not hmac.compare_digest(mark, hmac.new(key.encode(), body, hashlib.sha256).hexdigest().encode()):
        what = f"The list of files that {run} pushed to s3://{bucket.address.bucket}/{folder} is not signed by it."
        hint = "Someone else has written to the bucket. Files downloaded before are kept; nothing of this list is used."
        raise CollectFailed("collect.bucket_altered", what, hint=hint)
    try:
        head = parse_message(_Head, body, MOST_HEAD_BYTES)
        manifest = head.manifest
        demand_sound(manifest, most_bytes)
        if head.run != run:
            raise FarRefusal("nonsense", f"It belongs to {head.run!r}.")
        for file in manifest.files:
            places = head.places.get(file.name)
            if places is None or sum(size for _, _, size in places) != file.bytes:
                raise FarRefusal("nonsense", f"It has no place for {file.name!r}.")
    except FarRefusal as refusal:
        what = f"The list of what {run} has pushed cannot be used: {refusal.what}"
        raise CollectFailed("collect.bad_manifest", what, hint="Files downloaded before are kept.") from None
    return Pushed(manifest, head.places, head.left_out, head.seq)


def fetch_pushed(bucket: Bucket, folder: str, pushed: Pushed, expected: WantedFile, into: Path) -> Path:
    """Download one of the files. It gets its name once its digest is right. See `gpurun.remote.download.fetch`.

    Raise MachineLost if the bucket stops replying. Another call resumes the download.
    """
    places = pushed.places[expected.name]

    def pull(offset: int, most: int, take: Take) -> None:
        try:
            for slot, start, size in _find_ranges_within(places, offset, most):
                for block in bucket.stream(slot_key(folder, slot), start, size):
                    take(block)
        except BucketLost as lost:
            raise MachineLost(lost.what) from lost

    return fetch(expected, into, pull)


def gather_pushed(
    bucket: Bucket, folder: str, pushed: Pushed, files: Sequence[ManifestFile], take: TakeFile
) -> None:  # fmt: skip
    """Receive small files; adjacent files in a slot arrive in one request. Raise MachineLost as `fetch_pushed` does."""
    placed = sorted((pushed.places[file.name], file.name, file) for file in files if len(pushed.places[file.name]) == 1)
    runs: list[tuple[int, int, list[ManifestFile]]] = []
    end = (-1, 0)
    for (place, *_), _, file in placed:
        slot, start, size = place
        if end != (slot, start):
            runs.append((slot, start, []))
        runs[-1][2].append(file)
        end = slot, start + size
    try:
        for slot, start, some in runs:
            cutter = Cutter(some, take)
            cutter(b"")
            if not cutter.is_done:
                for block in bucket.stream(slot_key(folder, slot), start, sum(file.bytes for file in some)):
                    cutter(block)
    except BucketLost as lost:
        raise MachineLost(lost.what) from lost


def _find_ranges_within(
    places: tuple[tuple[int, int, int], ...], offset: int, most: int
) -> Iterator[tuple[int, int, int]]:
    """Yield where a range of a file is in the bucket: the slot, the offset in it, and the number of bytes."""
    begin = 0
    for slot, start, size in places:
        first, end = max(offset, begin), min(offset + most, begin + size)
        if first < end:
            yield slot, start + first - begin, end - first
        begin += size
