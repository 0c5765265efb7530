"""The last step of an upload. After it, either all files are in place and verified, or none is.

Its record is valid until the next boot at first, and permanently once all files are synced to disk. No client waits for
that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress

from gpurun.remote.agent.receive import FOLDER, PULLED, WAIT_S, Incoming, check_name, held_files, read_list
from gpurun.remote.agent.system import (
    Refusal,
    boot_id,
    lock,
    locked,
    path_in,
    read,
    sync_filesystem,
    sync_folder,
    write,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List

    from gpurun.remote.agent.system import Answer, Json

LOCK_S = 60


def settle(root: str, options: Json) -> Answer:
    """Check all parts and files against the manifest and rename the files into place; write `shipped.json` last."""
    digests, _, manifest = read_list(options).partition(b"\n")
    entries = json.loads(manifest)["files"]
    record = {"files": len(entries), "bytes": sum(entry["bytes"] for entry in entries)}
    record["manifest_sha256"] = hashlib.sha256(manifest).hexdigest()
    held = locked(root, "unpack.lock", WAIT_S)
    if read_upload_record(root) != record:
        if read(root, "agent", "job.json"):
            raise Refusal("started", "a job was started here, so its code and data are not replaced")
        incoming = Incoming(path_in(root, FOLDER, options["layout"]))
        check_parts(incoming, json.loads(digests))
        complete_files(root, incoming, entries)
        put_in_place(root, incoming.folder, entries)
        note_shipped(root, record)
    for folder in (FOLDER, PULLED):
        shutil.rmtree(path_in(root, folder), ignore_errors=True)
    os.close(held)
    sync_behind(root)
    return record, b""


def check_parts(incoming: Incoming, digests: List[str]) -> None:
    """Raise Refusal if a part is missing, or differs from the part that was sent last."""
    if incoming.verified != dict(enumerate(digests)):
        raise Refusal("wrong_digest", "not all of the %d parts are here as they were sent" % incoming.parts)


def complete_files(root: str, incoming: Incoming, entries: List[Json]) -> None:
    """Add the files that were not sent: empty ones, and those that an earlier pack left. Refuse a wrong file."""
    arrived, earlier = dict(incoming.files), held_files(root)
    for entry in entries:
        name, path = entry["name"], incoming.path(entry["name"])
        if name in arrived:
            if arrived.pop(name) != entry["bytes"] or os.path.getsize(path) != entry["bytes"]:
                raise Refusal("wrong_digest", "%r differs from the manifest" % name)
            continue
        check_name(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if entry["bytes"] == 0:
            open(path, "wb").close()
        elif entry["sha256"] in earlier:  # `begin` reported these files; the client may trust them.
            link_or_copy(earlier[entry["sha256"]][0], path, entry["bytes"])
        else:
            raise Refusal("wrong_digest", "%r was not sent, and no earlier upload has left it here" % name)
    if arrived:
        raise Refusal("wrong_digest", "%d files arrived that the manifest does not have" % len(arrived))


def link_or_copy(source: str, path: str, size: int) -> None:
    """Hard-link an existing file to `path`; copy it if the disk has no hard links."""
    if os.path.exists(path) and os.path.getsize(path) == size:
        return
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)


def put_in_place(root: str, folder: str, entries: List[Json]) -> None:
    """Replace the files of the earlier upload by those that arrived.

    The list of files is written first, so that after a crash the files in place are found and complete files are not
    sent again.
    """
    write(path_in(root, "agent", "pack.json"), {"files": entries})
    for path in (path_in(root, "agent", "shipped.json"), path_in(folder, "layout.json")):
        if os.path.exists(path):
            os.unlink(path)
    for name in ("bundle", "data"):
        shutil.rmtree(path_in(root, name), ignore_errors=True)
        if os.path.isdir(path_in(folder, "files", name)):
            os.rename(path_in(folder, "files", name), path_in(root, name))
    sync_folder(root)


def read_upload_record(root: str) -> Json:
    """Return the record of the upload; empty if there is none, or if a reboot may have lost some of its files."""
    record = read(root, "agent", "shipped.json") or {}
    return {} if record.pop("boot", boot_id()) != boot_id() else dict(record)


def note_shipped(root: str, record: Json) -> None:
    """Write the record of the upload. It is valid until the next boot; `sync_behind` makes it permanent."""
    if not boot_id():
        sync_filesystem(root)
    write(path_in(root, "agent", "shipped.json"), dict(record, boot=boot_id()))


def sync_behind(root: str) -> None:
    """Start a process that syncs the uploaded files to disk, which can take minutes."""
    try:
        if os.fork():
            return
    except OSError:  # No process can be started, so wait for the sync.
        make_durable(root)
        return
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):  # The client gets its reply when these are closed.
            os.dup2(nothing, descriptor)
        with suppress(OSError):  # An error means that the run's folder is gone, with its data.
            make_durable(root)
    finally:
        os._exit(0)


def make_durable(root: str) -> None:
    """Sync the upload to disk, then record that it is synced, unless another pack has replaced it in the meantime."""
    record = read(root, "agent", "shipped.json") or {}
    if "boot" not in record:
        return
    sync_filesystem(root)
    held = lock(root, "unpack.lock", LOCK_S)
    if held is not None:
        if read(root, "agent", "shipped.json") == record:
            write(path_in(root, "agent", "shipped.json"), {key: record[key] for key in record if key != "boot"})
        os.close(held)
