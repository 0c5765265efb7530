"""What is told of a job: its status, what it has said since, and its finished files."""

from __future__ import annotations

import json
import os
import time

from gpurun.remote.agent.job_state import blank, ensure_keeper
from gpurun.remote.agent.system import MOST_JSON_BYTES, Refusal, at, read, read_part, stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, List, Tuple

    from gpurun.remote.agent.system import Answer, Json

ENDED = ("exit_code", "signal", "stop_reason", "oom_kills", "memory_bytes", "shm_bytes")
"""What the status has of the job's end; an older agent's has the first three."""
TAILS = {"events.jsonl": "out", "trainer.log": "out", "agent.log": "agent"}
MANIFEST = "MANIFEST.json"
MOST_MANIFEST_BYTES = 256 << 20
LEAST_BLOCK_BYTES = 1 << 20
UNSAVED_S = 60.0


def poll(root: str, options: Json) -> Answer:
    """The status, and what has been added to files that grow."""
    now, chunks, content = status(root), [], b""
    for name, (offset, most) in sorted(json.loads(options["want"]).items()):
        if name not in TAILS:
            raise Refusal("no_such_file", "poll does not serve %r" % name)
        data, size = read_part(at(root, TAILS[name], name), offset, most)
        chunks.append({"name": name, "offset": offset, "bytes": len(data), "size": size})
        content += data
    return {"status": now, "chunks": chunks}, content


def unsaved(root: str, _: Json) -> Answer:
    """What a person should know before a dev box ends: terminals that are open, and what does not come home."""
    import subprocess
    import sys

    from gpurun.remote.agent.people import People
    from gpurun.remote.agent.processes import environment, trainers

    is_whole = (read(root, "agent", "job.json") or {}).get("attended") == "machine"
    words = [sys.executable, "-m", "gpurun.remote.agent.runner.unsaved", "machine" if is_whole else "folder"]
    done = subprocess.run(
        words, cwd=at(root, "bundle"), env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, timeout=UNSAVED_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Refusal("not_seen", done.stderr[-300:].decode("utf-8", "replace"))
    people = People(root, is_whole, 0.0)
    if os.path.isdir("/proc/self"):
        people.look(trainers(root))
    return dict(json.loads(done.stdout), terminals=len(people.seen)), b""


def doors(root: str, _: Json) -> Answer:
    """Where people work on this machine: the folder, and where JupyterLab listens, as it notes for its own user."""
    notes = os.path.join(root, "jupyter")
    names = [os.path.join(notes, name) for name in os.listdir(notes)] if os.path.isdir(notes) else []
    servers = [read(name) for name in sorted(names, key=changed_wall) if name.endswith(".json")]
    servers = [one for one in servers if isinstance(one, dict) and "port" in one]
    lab = {"port": servers[-1]["port"], "token": servers[-1].get("token", "")} if servers else None
    return {"host": os.uname().nodename, "folder": at(root, "bundle/work"), "jupyter": lab}, b""


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

    content = read_finished_list(root)
    if not content:
        raise Refusal("no_manifest", "no file is finished yet")
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, content


def read_finished_list(root: str) -> bytes:
    """The whole list of finished files; empty before there is one."""
    return b"".join(map(bytes, stream(at(root, "out", MANIFEST), 0, MOST_MANIFEST_BYTES)[0]))


def locate_finished(root: str, name: str) -> str:
    """The path of a finished file by its name, which is percent-encoded; Refusal for one that leads out of `out`.

    The list, which may be long, is read only for a name without a folder: beside it lie files that are none of it.
    """
    raw = raw_name(name)
    if b"/" not in raw:
        entries = json.loads(read_finished_list(root) or b'{"files": []}')["files"]
        raw = raw if name in [entry["name"] for entry in entries] else b""
    if not raw:
        raise Refusal("no_such_file", "%r is not in the manifest" % name)
    return os.path.join(root, "out", os.fsdecode(raw))


def raw_name(name: str) -> bytes:
    """The bytes of a name below `out`; none for one that is written in another way, or leads elsewhere."""
    from urllib.parse import quote_from_bytes, unquote_to_bytes

    raw = unquote_to_bytes(name)
    leads_out = b"\0" in raw or any(part in (b"", b".", b"..") for part in raw.split(b"/"))
    return b"" if leads_out or quote_from_bytes(raw, safe="/=+@,") != name else raw


def get(root: str, options: Json) -> Answer:
    """A part of a finished file, however long."""
    name, offset = options["name"], int(options["offset"])
    path = locate_finished(root, name)
    if not os.path.isfile(path):
        raise Refusal("no_such_file", "%r is not there any more" % name)
    blocks, length, size = stream(path, offset, int(options["most"]))
    return {"name": name, "offset": offset, "bytes": length, "size": size}, blocks


def gather(root: str, _: Json) -> Answer:
    """Many small files one after the other, framed by the list that home has of them: lines of bytes and name come in.

    The answer says which of them, by their place, are not there with that size; all others follow whole.
    """
    import sys

    paths, left, total = [], [], 0
    for place, line in enumerate(sys.stdin.buffer.read(MOST_JSON_BYTES).decode("ascii").splitlines()):
        size, _, name = line.partition(" ")
        path = locate_finished(root, name)
        try:
            is_there = os.lstat(path).st_size == int(size)
        except OSError:
            is_there = False
        if is_there:
            paths.append((path, int(size)))
            total += int(size)
        else:
            left.append(place)
    return {"bytes": total, "left": left}, gathered(paths)


def gathered(paths: List[Tuple[str, int]]) -> Iterator[bytes]:
    """Their content in blocks of some size; it ends early where one is not as long any more."""
    block = b""
    for path, size in paths:
        content = b"".join(map(bytes, stream(path, 0, size)[0]))
        block += content
        if len(block) >= LEAST_BLOCK_BYTES or len(content) != size:
            yield block
            block = b""
        if len(content) != size:
            return
    yield block
