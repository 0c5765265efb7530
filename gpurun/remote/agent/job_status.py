"""Reports on a job: its status, its new output, and its finished files."""

from __future__ import annotations

import json
import os
import time

from gpurun.remote.agent.job_state import blank, ensure_keeper
from gpurun.remote.agent.system import MOST_JSON_BYTES, Refusal, path_in, read, read_part, stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, List, Tuple

    from gpurun.remote.agent.system import Answer, Json

ENDED = ("exit_code", "signal", "stop_reason", "oom_kills", "memory_bytes", "shm_bytes")
"""The fields of the status about the job's end. An older agent's status has only the first three."""
TAILS = {"events.jsonl": "out", "trainer.log": "out", "agent.log": "agent"}
MANIFEST = "MANIFEST.json"
MOST_MANIFEST_BYTES = 256 << 20
LEAST_BLOCK_BYTES = 1 << 20
UNSAVED_S = 60.0


def poll(root: str, options: Json) -> Answer:
    """Return the status, and what was added to the growing files."""
    now, chunks, content = status(root), [], b""
    for name, (offset, most) in sorted(json.loads(options["want"]).items()):
        if name not in TAILS:
            raise Refusal("no_such_file", "poll does not serve %r" % name)
        data, size = read_part(path_in(root, TAILS[name], name), offset, most)
        chunks.append({"name": name, "offset": offset, "bytes": len(data), "size": size})
        content += data
    return {"status": now, "chunks": chunks}, content


def unsaved(root: str, _: Json) -> Answer:
    """Return what a user should know before a dev box ends: open terminals, and files that will not be downloaded."""
    import subprocess
    import sys

    from gpurun.remote.agent.people import People
    from gpurun.remote.agent.processes import environment, trainers

    is_whole = (read(root, "agent", "job.json") or {}).get("attended") == "machine"
    words = [sys.executable, "-m", "gpurun.remote.agent.runner.unsaved", "machine" if is_whole else "folder"]
    done = subprocess.run(
        words, cwd=path_in(root, "bundle"), env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, timeout=UNSAVED_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Refusal("not_seen", done.stderr[-300:].decode("utf-8", "replace"))
    people = People(root, is_whole, 0.0)
    if os.path.isdir("/proc/self"):
        people.look(trainers(root))
    return dict(json.loads(done.stdout), terminals=len(people.seen)), b""


def doors(root: str, _: Json) -> Answer:
    """Return where users work on this machine: the folder, and the port and token that JupyterLab has recorded."""
    notes = os.path.join(root, "jupyter")
    names = [os.path.join(notes, name) for name in os.listdir(notes)] if os.path.isdir(notes) else []
    servers = [read(name) for name in sorted(names, key=changed_wall) if name.endswith(".json")]
    servers = [server for server in servers if isinstance(server, dict) and "port" in server]
    lab = {"port": servers[-1]["port"], "token": servers[-1].get("token", "")} if servers else None
    return {"host": os.uname().nodename, "folder": path_in(root, "bundle/work"), "jupyter": lab}, b""


def status(root: str) -> Json:
    """Return the status, corrected by what the kernel knows. A trainer that has lost its keeper gets a new one.

    After a power failure the file may be empty. A job that had begun has then ended, and is never reported as idle.
    """
    keeper = ensure_keeper(root, fresh=False) if read(root, "agent", "job.json") else "nobody"
    path, end = path_in(root, "out", "status.json"), read(root, "agent", "exit.json")
    now = read(path) or dict(blank(root), wall=0.0)
    # On a full disk, a touched file is the keeper's only sign of life.
    now["wall"] = max(now["wall"], changed_wall(path)) or time.time()
    if end:
        now.update(state="exited", **{key: end[key] for key in ENDED if key in end})
    elif keeper == "nobody" and (now["state"] == "running" or os.path.exists(path_in(root, "agent", "keeper.json"))):
        now["state"] = "exited"
    return dict(now)


def changed_wall(path: str) -> float:
    """Return when a file was last written or touched; 0 if it does not exist."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def manifest(root: str, _: Json) -> Answer:
    """Return the list of finished files, as the trainer wrote it."""
    import hashlib

    content = read_finished_list(root)
    if not content:
        raise Refusal("no_manifest", "no file is finished yet")
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, content


def read_finished_list(root: str) -> bytes:
    """Return the whole list of finished files; empty if there is none yet."""
    return b"".join(map(bytes, stream(path_in(root, "out", MANIFEST), 0, MOST_MANIFEST_BYTES)[0]))


def locate_finished(root: str, name: str) -> str:
    """Return the path of a finished file by its percent-encoded name. Raise Refusal if the name leads out of `out`.

    The list, which may be long, is read only for a name without a folder, because other files are in the same folder.
    """
    raw = raw_name(name)
    if b"/" not in raw:
        entries = json.loads(read_finished_list(root) or b'{"files": []}')["files"]
        raw = raw if name in [entry["name"] for entry in entries] else b""
    if not raw:
        raise Refusal("no_such_file", "%r is not in the manifest" % name)
    return os.path.join(root, "out", os.fsdecode(raw))


def raw_name(name: str) -> bytes:
    """Return the bytes of an encoded name below `out`; empty if the name is malformed or leads out of `out`."""
    from urllib.parse import quote_from_bytes, unquote_to_bytes

    raw = unquote_to_bytes(name)
    leads_out = b"\0" in raw or any(part in (b"", b".", b"..") for part in raw.split(b"/"))
    return b"" if leads_out or quote_from_bytes(raw, safe="/=+@,") != name else raw


def get(root: str, options: Json) -> Answer:
    """Return a part of a finished file of any size."""
    name, offset = options["name"], int(options["offset"])
    path = locate_finished(root, name)
    if not os.path.isfile(path):
        raise Refusal("no_such_file", "%r no longer exists" % name)
    blocks, length, size = stream(path, offset, int(options["most"]))
    return {"name": name, "offset": offset, "bytes": length, "size": size}, blocks


def gather(root: str, _: Json) -> Answer:
    """Return many small files one after the other. Each line of the client's list has the bytes and name of one file.

    The reply states, by position, which files do not exist with that size. All others follow completely.
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
    return {"bytes": total, "left": left}, small_file_blocks(paths)


def small_file_blocks(paths: List[Tuple[str, int]]) -> Iterator[bytes]:
    """Yield the content of the files in blocks. Stop early if a file has become shorter."""
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
