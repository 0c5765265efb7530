"""Appends lines durably: once the call returns, the line is on disk, and a failed append is undone.

Also checks whether a disk supports that.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from gpurun.core.errors import SetupError, VerificationFailed
from gpurun.core.filelock import take_lock
from gpurun.core.paths import fsync_file, fsync_folder

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def append_durably(path: Path, line: bytes, *, after: int) -> int:
    """Append a line to a file of exactly `after` bytes, fsync it, and return the new length.

    If the write fails, the file is cut back to its old length, so the next line never follows half a line. If the file
    has another length, another program has changed it: raise VerificationFailed and write nothing. A full disk, or any
    other error of the system, is a SetupError.
    """
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise unwritable_error(path, error) from error
    try:
        if os.fstat(descriptor).st_size != after:
            raise VerificationFailed(
                "file.changed",
                f"{path} was changed by another program while gpurun was writing it.",
                hint="Nothing was written. Find out what else writes there before you continue.",
            )
        _write_or_undo(descriptor, line, after)
        if after == 0:
            fsync_folder(path.parent)
    except OSError as error:
        raise unwritable_error(path, error) from error
    finally:
        os.close(descriptor)
    return after + len(line)


def _write_or_undo(descriptor: int, line: bytes, after: int) -> None:
    try:
        rest = memoryview(line)
        while rest:  # `os.write` may write only a part: near a full disk, or when a signal arrives.
            rest = rest[os.write(descriptor, rest) :]
        fsync_file(descriptor)
    except OSError:
        os.ftruncate(descriptor, after)
        fsync_file(descriptor)
        raise


def unwritable_error(path: Path, error: OSError) -> SetupError:
    """Return the error for a file of the ledger that cannot be written."""
    if error.errno in _FULL:
        return SetupError(
            "disk.full",
            f"There is no space left to write {path}.",
            hint="Free some space; `gpurun resume` then continues from the last record.",
        )
    return SetupError(
        "ledger.unwritable",
        f"{path} cannot be written: {error.strerror}.",
        hint="Make it writable for you again; `gpurun resume` then continues from the last record.",
    )


def require_durable(folder: Path) -> None:
    """Check that locks and fsync work in a folder; SetupError if they do not (some network disks) or the disk is full.

    To test the lock, two descriptors request the lock of one file: the second request must fail.
    """
    try:
        first, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
        try:
            second = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            try:
                excluded = take_lock(first) and not take_lock(second)
            finally:
                os.close(second)
            os.write(first, b"probe\n")
            fsync_file(first)
            fsync_folder(folder)
        finally:
            os.close(first)
            os.unlink(name)
    except OSError as error:
        full = error.errno in _FULL
        raise unwritable_error(folder, error) if full else _not_durable_error(folder, str(error.strerror)) from error
    if not excluded:
        raise _not_durable_error(folder, "two programs were given the same lock")


def _not_durable_error(folder: Path, why: str) -> SetupError:
    return SetupError(
        "home.not_durable",
        f"The disk of {folder} cannot keep a journal safe: {why}.",
        hint="Choose a folder on a local disk: --home DIR or GPURUN_HOME.",
    )
