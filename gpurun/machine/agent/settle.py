"""The last step of what is shipped: it is in place whole and verified, or nothing of it is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from contextlib import suppress

from gpurun.machine.agent.clocks import monotonic
from gpurun.machine.agent.files import at, locked, read, sync_folder, write
from gpurun.machine.agent.incoming import FOLDER, PULLED, WAIT_S, Incoming, check_name, held_files, listed
from gpurun.machine.agent.protocol import Refusal
from gpurun.machine.agent.shipped import note_shipped, shipped, sync_behind
from gpurun.machine.agent.store import keep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List

    from gpurun.machine.agent.protocol import Answer, Json

LOOK_S = 0.005


def settle(root: str, options: Json) -> Answer:
    """Check all parts and files against the manifest and rename them into place; `shipped.json` is written last.

    It waits for the list of all that, which begins with its own digest: the last parts may still be on their way.
    """
    digests, _, manifest = told().partition(b"\n")
    entries = json.loads(manifest)["files"]
    record = {"files": len(entries), "bytes": sum(entry["bytes"] for entry in entries)}
    record["manifest_sha256"] = hashlib.sha256(manifest).hexdigest()
    await_parts(root, options, json.loads(digests))
    held = locked(root, "unpack.lock", WAIT_S)
    if shipped(root) != record:
        if read(root, "agent", "job.json"):
            raise Refusal("started", "a job was started here; its code and data are not replaced")
        incoming = Incoming(at(root, FOLDER, options["layout"]))
        check_parts(incoming, json.loads(digests))
        gather(root, incoming, entries)
        put_in_place(root, incoming.folder, entries)
        note_shipped(root, record)
    if int(options.get("store", 0)):
        with suppress(OSError):  # A disk without links keeps nothing; what was shipped is in place all the same.
            keep(root, entries, int(options["store"]))
    for folder in (FOLDER, PULLED):
        shutil.rmtree(at(root, folder), ignore_errors=True)
    os.close(held)
    sync_behind(root)
    return record, b""


def told() -> bytes:
    """Standard input whole, after a first line that has its digest."""
    return listed({"sha256": sys.stdin.buffer.read(65).decode("ascii", "replace").rstrip("\n")})


def await_parts(root: str, options: Json, digests: List[str]) -> None:
    """Wait until all parts are there, or none has come for as long as the sender says that they may take."""
    log, wait_s = at(root, FOLDER, options["layout"], "verified"), float(options["wait"])
    least_bytes = sum(len("%d %s\n" % part) for part in enumerate(digests))
    seen_bytes, end = 0, monotonic() + wait_s
    while os.path.exists(log) and monotonic() < end:
        size = os.path.getsize(log)
        if size > least_bytes:
            return
        if size > seen_bytes:
            seen_bytes, end = size, monotonic() + wait_s
        time.sleep(LOOK_S)


def check_parts(incoming: Incoming, digests: List[str]) -> None:
    """Refuse when a part is missing, or is another than was sent last."""
    if incoming.verified != dict(enumerate(digests)):
        raise Refusal("wrong_digest", "not all of the %d parts are here as they were sent" % incoming.parts)


def gather(root: str, incoming: Incoming, entries: List[Json]) -> None:
    """Complete the files: those that are empty, and those that an earlier pack left here; refuse any that is amiss."""
    came, earlier = dict(incoming.files), held_files(root)
    for entry in entries:
        name, path = entry["name"], incoming.path(entry["name"])
        if name in came:
            if came.pop(name) != entry["bytes"] or os.path.getsize(path) != entry["bytes"]:
                raise Refusal("wrong_digest", "%r is not as the manifest has it" % name)
            continue
        check_name(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if entry["bytes"] == 0:
            open(path, "wb").close()
        elif entry["sha256"] in earlier:  # `begin` has said so, and why it may be believed
            take(earlier[entry["sha256"]][0], path, entry["bytes"])
        else:
            raise Refusal("wrong_digest", "%r did not come, and is not here from before" % name)
    if came:
        raise Refusal("wrong_digest", "%d files came that the manifest does not have" % len(came))


def take(source: str, path: str, size: int) -> None:
    """Give a file that is here already one more name; where the disk has no links, a copy."""
    if os.path.exists(path) and os.path.getsize(path) == size:
        return
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)


def put_in_place(root: str, folder: str, entries: List[Json]) -> None:
    """Let what came take the place of what was shipped before.

    The list of it is there first: what a crash leaves in place is then found again, and what of it is whole not sent
    twice.
    """
    write(at(root, "agent", "pack.json"), {"files": entries})
    for path in (at(root, "agent", "shipped.json"), at(folder, "layout.json")):
        if os.path.exists(path):
            os.unlink(path)
    for name in ("bundle", "data"):
        shutil.rmtree(at(root, name), ignore_errors=True)
        if os.path.isdir(at(folder, "files", name)):
            os.rename(at(folder, "files", name), at(root, name))
    sync_folder(root)
