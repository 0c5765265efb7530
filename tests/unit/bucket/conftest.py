"""Fixtures of a bucket on this computer, and of files that are worth staging in it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.remote.archive import PackedFile, survey
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.s3_client import Bucket
from tests.emulators.s3 import S3Emulator


@pytest.fixture
def bucket(s3: S3Emulator) -> Bucket:
    return Bucket(parse_address("s3://shards/team/gpt"), SystemClock())


def shard(folder: Path, name: str, size: int, seed: int = 1) -> PackedFile:
    """Write a file that does not compress, because S3 demands pieces of a minimum size; return it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(random.Random(seed).randbytes(size))
    return next(file for file in survey({"data": folder}).files if file.name == f"data/{name}")
