"""Copies of what came home, in a folder of the user's own: each has the digest that was verified, or is not there."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from gpurun.core.errors import CollectFailed, GpurunError, StoreFull, UsageError
from gpurun.core.paths import fsync_folder
from gpurun.machine.answers import ManifestFile, check_name
from gpurun.machine.fetch import Wanted, holds

_BLOCK_BYTES = 1 << 20


def copy_out(artifacts: Path, files: Sequence[ManifestFile], folder: Path) -> None:
    """Copy files into a folder under their own names; a copy that is there already is left alone.

    UsageError, before anything is copied, when another file is in the place of one. CollectFailed when a copy cannot
    be written, or is not what came home; then nothing of it is left.
    """
    try:
        places = {folder.joinpath(*check_name(file.name)): file for file in files}
        missing = {place: file for place, file in places.items() if not _is_there(place, file)}
        _check_room(folder, sum(file.bytes for file in missing.values()))
        for place, file in missing.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            _copy(artifacts / file.name, place, file)
    except OSError as error:
        what = f"{error.filename or folder} cannot be copied to: {error.strerror}."
        hint = f"Mend that, or name another folder with --to. What came home is in {artifacts}."
        raise CollectFailed("collect.cannot_store", what, hint=hint) from error


def _is_there(place: Path, file: ManifestFile) -> bool:
    """Whether the copy is there; UsageError when something else is."""
    if holds(place, Wanted(file.name, file.bytes, file.sha256)):
        return True
    if os.path.lexists(place):
        hint = "Name another folder with --to, or move that file away."
        raise UsageError("collect.in_the_way", f"{place} is there already, and is another file.", hint=hint)
    return False


def _check_room(folder: Path, needed_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        what = f"The copies need {needed_bytes:,} bytes; the disk of {folder} has {free_bytes:,} free."
        raise StoreFull("collect.disk_full", what, hint="Free some space, or name another folder with --to.")


def _copy(source: Path, place: Path, file: ManifestFile) -> None:
    part, digest = place.with_name(f".{place.name}.{os.getpid()}.{threading.get_ident()}.part"), hashlib.sha256()
    try:
        with source.open("rb") as content, part.open("wb") as out:
            while block := content.read(_BLOCK_BYTES):
                digest.update(block)
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != file.sha256:
            raise _altered(source)
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)
    fsync_folder(place.parent)


def _altered(source: Path) -> GpurunError:
    return CollectFailed(
        "collect.altered",
        f"{source} is not what came home any more: its digest is another one.",
        hint="gpurun audit says what else is not as it was.",
    )
