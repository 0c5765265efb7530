"""What is told of a job: its status, what it has said since, and its finished files."""

from __future__ import annotations

import json
import os
import re
import time

from gpurun.remote.agent.job_state import blank, ensure_keeper
from gpurun.remote.agent.system import MOST_JSON_BYTES, Refusal, at, part, read, stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpurun.remote.agent.system import Answer, Json

ENDED = ("exit_code", "signal", "stop_reason", "oom_kills", "memory_bytes", "shm_bytes")
"""What the status has of the job's end; an older agent's has the first three."""
TAILS = {"events.jsonl": "out", "trainer.log": "out", "agent.log": "agent"}
NAME = r"{0}(/{0}){{0,8}}".format(r"[A-Za-z0-9_=+@,-][A-Za-z0-9._=+@,-]{0,79}")


def poll(root: str, options: Json) -> Answer:
    """The status, and what has been added to files that grow."""
    now, chunks, content = status(root), [], b""
    for name, (offset, most) in sorted(json.loads(options["want"]).items()):
        if name not in TAILS:
            raise Refusal("no_such_file", "poll does not serve %r" % name)
        data, size = part(at(root, TAILS[name], name), offset, most)
        chunks.append({"name": name, "offset": offset, "bytes": len(data), "size": size})
        content += data
    return {"status": now, "chunks": chunks}, content


def status(root: str) -> Json:
    """The heartbeat, corrected by what the kernel knows; a trainer that lost its keeper is given a new one.

    After a power cut the file may be empty: a job that had begun has ended then, and is never called idle.
    """
    keeper = ensure_keeper(root, fresh=False) if read(root, "agent", "job.json") else "nobody"
    path, end = at(root, "out", "status.json"), read(root, "agent", "exit.json")
    now = read(path) or dict(blank(root), wall=0.0)
    # All that a keeper can tell of its life on a full disk is that the file was touched.
    now["wall"] = max(now["wall"], changed_wall(path)) or time.time()
    if end:
        now.update(state="exited", **{key: end[key] for key in ENDED if key in end})
    elif keeper == "nobody" and (now["state"] == "running" or os.path.exists(at(root, "agent", "keeper.json"))):
        now["state"] = "exited"
    return dict(now)


def changed_wall(path: str) -> float:
    """When a file was last written or touched; 0 when it is not there."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def manifest(root: str, _: Json) -> Answer:
    """The list of finished files, as the trainer wrote it."""
    import hashlib

    content = part(at(root, "out", "MANIFEST.json"), 0, MOST_JSON_BYTES)[0]
    if not content:
        raise Refusal("no_manifest", "no file is finished yet")
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, content


def get(root: str, options: Json) -> Answer:
    """A part of a finished file, however long."""
    name, offset = options["name"], int(options["offset"])
    listed = (read(root, "out", "MANIFEST.json") or {"files": []})["files"]
    if not re.fullmatch(NAME, name) or name not in {entry["name"] for entry in listed}:
        raise Refusal("no_such_file", "%r is not in the manifest" % name)
    blocks, length, size = stream(at(root, "out", name), offset, int(options["most"]))
    return {"name": name, "offset": offset, "bytes": length, "size": size}, blocks
