"""System calls that Python 3.11 does not have. Linux only; each raises OSError if it fails."""

from __future__ import annotations

import ctypes
import os
import select
import signal

NEW_MOUNTS, NEW_HOSTNAME, NEW_IPC, NEW_PIDS = 0x00020000, 0x04000000, 0x08000000, 0x20000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
_DETACH = 2
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces of these kinds."""
    _call("unshare", flags)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mount a file system; `kind` and `data` are what mount(8) takes after -t and -o."""
    texts = [text.encode() or None for text in (source, target, kind, data)]
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Show a file or folder at a second path too."""
    mount(source, target, flags=BIND)
    if read_only:
        mount("", target, flags=BIND | REMOUNT | READ_ONLY)


def unmount(target: str) -> None:
    """Detach a mount, even if it is in use."""
    _call("umount2", target.encode(), _DETACH)


def fork_bound() -> int:
    """Fork a child that is killed when this thread ends, even before the child has requested that."""
    alive, held = os.pipe()
    child = os.fork()
    if child:
        os.close(alive)
        return child  # `held` stays open until this process dies, which closes files before it signals its children.
    os.close(held)
    _call("prctl", _SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if select.select([alive], [], [], 0)[0]:
        os._exit(1)
    os.close(alive)
    return 0


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _call("prctl", _SET_CHILD_SUBREAPER, 1, 0, 0, 0)
