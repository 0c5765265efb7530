"""The address of objects: the bucket, and the prefix of their names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpurun.core.errors import UsageError

_ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9!_.*'()/-]*))?")


@dataclass(frozen=True)
class BucketAddress:
    """A bucket, and the prefix of all object names that gpurun uses in it."""

    bucket: str
    prefix: str

    def key(self, *names: str) -> str:
        """Return the name of an object below the prefix."""
        return "/".join((*filter(None, self.prefix.split("/")), *names))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key()}".rstrip("/")


def parse_address(text: str) -> BucketAddress:
    """Parse `s3://bucket/prefix`. Raise UsageError for anything else."""
    found = _ADDRESS.fullmatch(text)
    parts = (found[2] or "").split("/") if found else []
    if found is None or ".." in parts or "." in parts:
        raise UsageError(
            "stage.address",
            f"--stage {text[:200]!r} is not the address of a bucket.",
            hint="Write it as s3://bucket/prefix. For an endpoint other than AWS's, set AWS_ENDPOINT_URL_S3.",
        )
    return BucketAddress(found[1], "/".join(filter(None, parts)))
