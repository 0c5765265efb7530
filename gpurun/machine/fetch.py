"""One file brought home: in parts, resumed where it stopped, and put under its name only when its digest holds."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gpurun.core.errors import CollectFailed, StoreFull
from gpurun.core.paths import fsync_folder, make_private
from gpurun.machine.answers import check_name

MOST_PART_BYTES = 8 << 20
PARTIAL_FOLDER = ".partial"
_REFETCHES = 3

# Asks for `most` bytes from an offset on; fewer may come, none means that there are no more.
Get = Callable[[int, int], bytes]


@dataclass(frozen=True)
class Wanted:
    """A file of a verified manifest, and what is told as it arrives (bytes so far)."""

    name: str
    size_bytes: int
    sha256: str
    on_progress: Callable[[int], None] | None = None


def fetch(wanted: Wanted, into: Path, get: Get) -> Path:
    """Bring one file to `into`/name and return its path; a file that is there already, digest verified, is left alone.

    What has arrived is kept in `into`/.partial under its digest, so a later call goes on from there. A wrong digest is
    fetched again three times. CollectFailed: the digest never held, or the file could not be stored; files that were
    verified before stay as they are.
    """
    parts = check_name(wanted.name)
    target = into.joinpath(*parts)
    if _holds(target, wanted):
        return target
    try:
        for folder in (into, target.parent, into / PARTIAL_FOLDER):
            make_private(folder)
        partial = into / PARTIAL_FOLDER / wanted.sha256
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            _fill(file, wanted, get, free=lambda: shutil.disk_usage(into).free)
        os.replace(partial, target)
        fsync_folder(target.parent)
    except OSError as error:
        raise _cannot_store(target, wanted, error) from error
    return target


def _holds(target: Path, wanted: Wanted) -> bool:
    """Whether the file is here already."""
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        return os.fstat(descriptor).st_size == wanted.size_bytes and _digest(file).hexdigest() == wanted.sha256


def _digest(file: IO[bytes]) -> hashlib._Hash:
    """The running sha256 of a file from its beginning; the position is then its end."""
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def _fill(file: IO[bytes], wanted: Wanted, get: Get, free: Callable[[], int]) -> None:
    """Complete the partial file and make it durable, or raise CollectFailed with nothing wrong left in it."""
    for _ in range(1 + _REFETCHES):
        if os.fstat(file.fileno()).st_size > wanted.size_bytes:
            file.truncate(0)
        digest = _digest(file)
        while (have := file.tell()) < wanted.size_bytes:
            if wanted.size_bytes - have > free():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = get(have, min(MOST_PART_BYTES, wanted.size_bytes - have))
            if not data:
                break
            digest.update(data)
            file.write(data)
            file.flush()
            if wanted.on_progress is not None:
                wanted.on_progress(file.tell())
        if file.tell() == wanted.size_bytes and digest.hexdigest() == wanted.sha256:
            os.fsync(file.fileno())
            return
        file.truncate(0)
    raise CollectFailed(
        "collect.wrong_digest",
        f"{wanted.name} came back {1 + _REFETCHES} times with another digest or size than the instance announced.",
        hint="What was verified before is kept in artifacts/. The instance or the way to it is damaged.",
    )


def _cannot_store(target: Path, wanted: Wanted, error: OSError) -> CollectFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            "collect.disk_full",
            f"There is no room for {wanted.name} ({wanted.size_bytes:,} bytes) in {target.parent}.",
            hint="Free some space: it goes on by itself where it stopped. The lease keeps counting.",
        )
    return CollectFailed(
        "collect.cannot_store",
        f"{target} cannot be written: {error.strerror}.",
        hint="Mend what is said there, then gpurun resume RUN.",
    )
