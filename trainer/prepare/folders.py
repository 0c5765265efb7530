"""A folder is there whole or not at all: it is made under another name beside its place, then renamed into it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.prepare.errors import Refusal
from trainer.prepare.shards import sync_folder

__all__ = ["held", "locked", "replace_folder", "staging"]


@contextlib.contextmanager
def staging(place: Path) -> Iterator[Path]:
    """A new folder beside `place`, removed at the end if it is still there; so are those that dead processes left."""
    place.parent.mkdir(parents=True, exist_ok=True)
    for left in place.parent.glob(f".{place.name}.preparing-*-*"):
        if not _alive(left.name.split("-")[-2]):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{place.name}.preparing-{os.getpid()}-", dir=place.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(folder: Path, place: Path) -> None:
    """Rename a finished folder into its place; what was prepared there before goes, anything else is a Refusal."""
    if place.is_dir() and any(place.iterdir()):
        if not (place / "data.json").is_file():
            raise Refusal(
                "data.out_in_use",
                f"{place} holds other files; prepared data would replace them.",
                hint="Name an empty or a new folder with --out.",
            )
        # Beside the staging folder and under its name, so that a crash between the two renames leaves nothing for good.
        old = folder.with_name(f"{folder.name}old")
        os.rename(place, old)
        os.rename(folder, place)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(folder, place)
    sync_folder(place.parent)


@contextlib.contextmanager
def locked(cache: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the cache's kernel lock, which a killed process lets go of by itself; who must wait for it says so."""
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(cache / ".lock", "w") as file:
        if not _locked(file.fileno()):
            say("another run tokenises just now; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def held(folder: Path, patience_s: float = 2.0) -> Iterator[None]:
    """Hold a folder for this process alone, made if it must be, and removed at the end if nothing is in it.

    Raises Refusal where it cannot be made, and where another one holds it for longer than `patience_s`: one that was
    killed needs a moment to end.
    """
    until = time.monotonic() + patience_s
    while (descriptor := _held_once(folder)) is None:
        if time.monotonic() > until:
            raise Refusal(
                "prepare.busy",
                f"Another prepare is writing into {folder}.",
                hint="Wait for it to end, or name another folder with --out.",
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
        os.close(descriptor)


def _held_once(folder: Path) -> int | None:
    """The descriptor by which a folder is held from now on; None where another one holds it, or just removed it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = f"{folder} is no folder, and cannot be made one: {error.strerror}."
        raise Refusal("data.out_unusable", what, hint="Name another folder with --out, where you may write.") from None
    with contextlib.suppress(FileNotFoundError):
        if _locked(descriptor) and os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    os.close(descriptor)
    return None


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
