"""The record of what was shipped whole, and how it comes to be on the disk without anybody waiting for that."""

from __future__ import annotations

import os
from contextlib import suppress

from gpurun.machine.agent.clocks import boot_id
from gpurun.machine.agent.files import at, lock, read, sync_filesystem, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpurun.machine.agent.protocol import Json

LOCK_S = 60


def shipped(root: str) -> Json:
    """The record, empty where there is none, or where a reboot came before all of it was on the disk."""
    record = read(root, "agent", "shipped.json") or {}
    return {} if record.pop("boot", boot_id()) != boot_id() else dict(record)


def note_shipped(root: str, record: Json) -> None:
    """Write the record. It counts until the next boot; `sync_behind` makes it count for good."""
    if not boot_id():
        sync_filesystem(root)
    write(at(root, "agent", "shipped.json"), dict(record, boot=boot_id()))


def sync_behind(root: str) -> None:
    """Have a process of its own write to the disk what the trainer can read already; a slow disk takes minutes."""
    try:
        if os.fork():
            return
    except OSError:  # No process is to be had: then it is waited for.
        make_durable(root)
        return
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):  # Whoever asked is answered when these are closed.
            os.dup2(nothing, descriptor)
        with suppress(OSError):  # The run's folder is gone, and its data with it.
            make_durable(root)
    finally:
        os._exit(0)


def make_durable(root: str) -> None:
    """Sync all that was shipped, then say so in the record, unless that speaks of another pack by now."""
    record = read(root, "agent", "shipped.json") or {}
    if "boot" not in record:
        return
    sync_filesystem(root)
    held = lock(root, "unpack.lock", LOCK_S)
    if held is not None:
        if read(root, "agent", "shipped.json") == record:
            write(at(root, "agent", "shipped.json"), {key: record[key] for key in record if key != "boot"})
        os.close(held)
