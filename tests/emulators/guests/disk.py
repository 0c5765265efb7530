"""The guest's file system: this computer's files under a layer in memory that takes the guest's writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.emulators.guests import kernel

# Folders that are empty in a new guest, with their permissions: it must not see this computer's files there.
_OWN = {"root": 0o711, "home": 0o755, "tmp": 0o1777, "run": 0o755, "workspace": 0o777}
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}


def assemble(place: Path, *, size_mb: int, kept: Sequence[str]) -> Path:
    """Mount the guest's root below `place` and return it; raise OSError where this computer does not allow it.

    Only this process's mount namespace has the mounts, and they end with it. The guest may write `size_mb`; 0 sets no
    limit. `kept` are folders that the guest sees read-only, although they are on another disk or below its own folders.
    """
    kernel.mount("", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("tmpfs", str(place), "tmpfs", data=f"mode=755,size={size_mb}m" if size_mb else "mode=755")
    upper, work, root, own = (place / name for name in ("upper", "work", "root", "own"))
    for folder in (upper, work, root, own):
        folder.mkdir()
    kernel.mount("overlay", str(root), "overlay", data=f"lowerdir=/,upperdir={upper},workdir={work}")
    for name, mode in _OWN.items():
        _own_folder(root / name, own / name, mode)
    _devices(root / "dev", own / "dev")
    for name in ("proc", "sys"):
        (root / name).mkdir(exist_ok=True)
    kernel.bind("/sys", str(root / "sys"), read_only=True)
    disk = os.stat("/").st_dev
    for source in kept:
        if source.startswith(tuple(f"/{name}/" for name in _OWN)) or os.stat(source).st_dev != disk:
            Path(f"{root}{source}").mkdir(parents=True, exist_ok=True)
            kernel.bind(source, f"{root}{source}", read_only=True)
    return root


def _own_folder(where: Path, what: Path, mode: int) -> None:
    what.mkdir()
    what.chmod(mode)
    where.mkdir(exist_ok=True)
    kernel.bind(str(what), str(where))


def _devices(where: Path, what: Path) -> None:
    """Create the devices that every program needs, with separate terminals and shared memory for the guest."""
    _own_folder(where, what, 0o755)
    for name in filter(lambda name: os.path.exists(f"/dev/{name}"), _DEVICES):
        (where / name).touch()
        kernel.bind(f"/dev/{name}", str(where / name))
    for name, target in _DEVICE_LINKS.items():
        (where / name).symlink_to(target)
    for name in ("pts", "shm"):
        (where / name).mkdir()
    kernel.mount("devpts", str(where / "pts"), "devpts", data="newinstance,ptmxmode=0666,mode=620")
    kernel.mount("tmpfs", str(where / "shm"), "tmpfs", data="mode=1777")
