"""The names of staged objects in a bucket, and the index of a file's parts. The package has the layout."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpurun.remote.chunks import MOST_SENT_BYTES, part_bytes_for
from gpurun.remote.s3.s3_client import Bucket

LEAST_BYTES = 256 << 10
"""A smaller file is sent over SSH with the others: a separate request for it would take longer."""
MOST_PARTS = 9_999
"""S3's limit for the number of pieces. A file with more parts (above 80 GB) is sent over SSH."""
MOST_INDEX_BYTES = 1 << 20

_Size = Annotated[int, Field(gt=0, le=MOST_SENT_BYTES)]


class Index(BaseModel):
    """The size of each part of a staged file, and the etag of the one object that contains all parts."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    v: Literal[1] = 1
    sha256: str
    bytes: int
    part_bytes: int
    codec: Literal["zstd"] = "zstd"
    sent: Annotated[tuple[_Size, ...], Field(max_length=MOST_PARTS)]
    etag: Annotated[str, Field(max_length=200)]

    @property
    def sent_bytes(self) -> int:
        """Return the size of the whole object in bytes."""
        return sum(self.sent)


def is_worth_staging(size_bytes: int) -> bool:
    """Return whether a file of this size is sent through the bucket."""
    return size_bytes >= LEAST_BYTES and -(-size_bytes // part_bytes_for(size_bytes)) <= MOST_PARTS


def data_key(bucket: Bucket, sha256: str) -> str:
    """Return the name of the object with a file's parts."""
    return bucket.address.key("files", f"{sha256}.zst")


def index_key(bucket: Bucket, sha256: str) -> str:
    """Return the name of a file's index."""
    return bucket.address.key("files", f"{sha256}.json")


def find_staged(bucket: Bucket, sha256: str, size_bytes: int) -> Index | None:
    """Return the index of a completely staged file; None if the object is missing or was altered.

    A different tag or size reveals an altered object at once. The digests reveal any other change.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        return None
    content = bucket.get(index_key(bucket, sha256), MOST_INDEX_BYTES)
    if content is None:
        return None
    try:
        index = Index.model_validate_json(content)
    except ValidationError:
        return None
    part_bytes = part_bytes_for(size_bytes)
    is_of_it = (index.sha256, index.bytes, index.part_bytes) == (sha256, size_bytes, part_bytes)
    if not is_of_it or len(index.sent) != -(-size_bytes // part_bytes):
        return None
    head = bucket.head(data_key(bucket, sha256))
    return index if head is not None and (head.bytes, head.etag) == (index.sent_bytes, index.etag) else None


def forget(bucket: Bucket, sha256: str) -> None:
    """Make a file count as not staged, so that the next run stages it again."""
    bucket.drop(index_key(bucket, sha256))
