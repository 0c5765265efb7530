"""The last step of what is shipped: it is in place whole and verified, or nothing of it is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress

from gpurun.machine.agent.files import at, locked, read, sync_filesystem, sync_folder, write
from gpurun.machine.agent.incoming import FOLDER, PULLED, WAIT_S, Incoming, check_name, held_files, listed
from gpurun.machine.agent.protocol import Refusal
from gpurun.machine.agent.store import keep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List

    from gpurun.machine.agent.protocol import Answer, Json


def settle(root: str, options: Json) -> Answer:
    """Check all parts and files against the manifest and rename them into place; `shipped.json` is written last."""
    digests, _, manifest = listed(options).partition(b"\n")
    entries = json.loads(manifest)["files"]
    shipped = {"files": len(entries), "bytes": sum(entry["bytes"] for entry in entries)}
    shipped["manifest_sha256"] = hashlib.sha256(manifest).hexdigest()
    held = locked(root, "unpack.lock", WAIT_S)
    if read(root, "agent", "shipped.json") != shipped:
        if read(root, "agent", "job.json"):
            raise Refusal("started", "a job was started here; its code and data are not replaced")
        incoming = Incoming(at(root, FOLDER, options["layout"]))
        check_parts(incoming, json.loads(digests))
        gather(root, incoming, entries)
        put_in_place(root, incoming.folder, entries)
        write(at(root, "agent", "shipped.json"), shipped)
    if int(options.get("store", 0)):
        with suppress(OSError):  # A disk without links keeps nothing; what was shipped is in place all the same.
            keep(root, entries, int(options["store"]))
    for folder in (FOLDER, PULLED):
        shutil.rmtree(at(root, folder), ignore_errors=True)
    os.close(held)
    return shipped, b""


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
            if not os.path.exists(path):
                os.link(earlier[entry["sha256"]][0], path)
        else:
            raise Refusal("wrong_digest", "%r did not come, and is not here from before" % name)
    if came:
        raise Refusal("wrong_digest", "%d files came that the manifest does not have" % len(came))


def put_in_place(root: str, folder: str, entries: List[Json]) -> None:
    """Make what came durable, then let it take the place of what was shipped before.

    The list of it is there first: what a crash leaves in place is then found again, and not sent twice.
    """
    sync_filesystem(folder)
    write(at(root, "agent", "pack.json"), {"files": entries})
    for path in (at(root, "agent", "shipped.json"), at(folder, "layout.json")):
        if os.path.exists(path):
            os.unlink(path)
    for name in ("bundle", "data"):
        shutil.rmtree(at(root, name), ignore_errors=True)
        if os.path.isdir(at(folder, "files", name)):
            os.rename(at(folder, "files", name), at(root, name))
    sync_folder(root)
