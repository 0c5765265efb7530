"""The first look at the machine: its hardware, its codecs, its torch, and earlier uploads.

It also tests whether things work: whether the disk accepts a file, and whether each GPU runs a kernel (`torch_look`).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys

from gpurun.remote.agent.decompress import codecs
from gpurun.remote.agent.finish_upload import read_upload_record
from gpurun.remote.agent.gpu_use import SILENT, figure, query, smi_answer
from gpurun.remote.agent.job_state import clocks_now, note_call
from gpurun.remote.agent.login_environment import learn, remembered_variables
from gpurun.remote.agent.processes import environment
from gpurun.remote.agent.system import cores, path_in, read, write
from gpurun.remote.agent.torch_look import Looks, keep_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Tuple

    from gpurun.remote.agent.system import Answer, Json

SHM = "/dev/shm"
WRITTEN_BYTES = 1 << 20


def hello(root: str, options: Json) -> Answer:
    """Return the machine's facts and its current time, which is also recorded.

    Lines that name the Pythons that are still being examined may come before the reply.
    """
    write_out(root)
    exported = learn(root)
    looks = Looks(root, options.get("python"))
    # Before torch uses the GPUs, so that the agent's own use does not count as another program's.
    cards, words = find_gpus()

    def tell(waiting: Json) -> None:
        sys.stdout.buffer.write(json.dumps({"looking": waiting}).encode() + b"\n")
        sys.stdout.buffer.flush()
        note_call(root)

    torch = looks.best(tell)  # This may take minutes, so the time is read afterwards.
    clocks = clocks_now()
    write(path_in(root, "agent", "clock.json"), clocks)
    return {
        "v": 1,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_free_bytes": shutil.disk_usage(root).free,
        "shm_bytes": shutil.disk_usage(SHM).total if os.path.isdir(SHM) else None,
        "codecs": codecs(),
        "wall": clocks["wall"],
        "boot_id": clocks["boot_id"],
        "shipped_sha256": read_upload_record(root).get("manifest_sha256"),
        "gpus": cards,
        "driver_words": keep_end(words) or None,
        "torch": torch,
        "exported": exported,
    }, b""


def write_out(root: str) -> None:
    """Write a file to the output folder: a read-only disk, or one without quota or inodes, may still show space."""
    path = path_in(root, "out", ".written")
    try:
        with open(path, "wb") as file:
            file.write(b"\0" * WRITTEN_BYTES)
            file.flush()
            os.fsync(file.fileno())
    finally:
        if os.path.exists(path):
            os.unlink(path)


def imports(root: str, options: Json) -> Answer:
    """Return which of these top-level modules the job's Python cannot find. None of them is run."""
    python = options.get("python") or (read(root, "agent", "python.json") or {}).get("python") or sys.executable
    path = {"PYTHONPATH": options["path"]} if options.get("path") else {}
    answer = {"python": keep_end(python), "missing": [], "note": ""}
    try:
        variables = dict(remembered_variables(root), **path)
        done = subprocess.run(
            [python, "-c", FIND, *options["names"].split(",")], env=environment(**variables),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=FIND_S,
        )  # fmt: skip
        answer["missing"] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        answer["note"] = keep_end("%s did not report which modules it finds: %s" % (python, error))
    return answer, b""


FIND_S = 60.0
FIND = """
import json, sys
from importlib.util import find_spec
sys.path[:] = [place for place in sys.path if place]
def is_there(name):
    try:
        return name in sys.modules or find_spec(name) is not None
    except Exception:
        return True
print(json.dumps([name for name in sys.argv[1:] if not is_there(name)]))
"""
FIELDS = ("name", "memory.total", "driver_version")
USE_FIELDS = ("uuid", "memory.used", "mig.mode.current")
ECC_FIELD = "ecc.errors.uncorrected.volatile.total"
HOLDER_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
WAIT_S = 30


def find_gpus() -> Tuple[List[Json], str]:
    """Return one entry per GPU, and nvidia-smi's error message. Without nvidia-smi, there are no entries."""
    words = ""
    for fields in ((*FIELDS, *USE_FIELDS, ECC_FIELD), (*FIELDS, ECC_FIELD), FIELDS):  # Older drivers lack some fields.
        rows, trouble = smi_answer("gpu", fields, WAIT_S)
        words = trouble or words
        if rows:
            held = holders() if len(fields) > 5 else {}
            return [gpu({name: row[place] for place, name in enumerate(fields)}, held) for row in rows], trouble
        if SILENT in trouble:
            break
    return [], words


def gpu(row: Dict[str, str], held: Dict[str, List[str]]) -> Json:
    """Return the entry of one GPU. A figure that the GPU does not report is None."""
    memory_mib, used_mib = figure(row["memory.total"]), figure(row.get("memory.used", ""))
    return {
        "name": row["name"][:200],
        "memory_bytes": None if memory_mib is None else memory_mib << 20,
        "driver": row["driver_version"][:200],
        "ecc_errors": figure(row.get(ECC_FIELD, "")),
        "uuid": row.get("uuid", "")[:200],
        "used_bytes": None if used_mib is None else used_mib << 20,
        "mig": row.get("mig.mode.current") == "Enabled",
        "holders": held.get(row.get("uuid", ""), [])[:8],
    }


def holders() -> Dict[str, List[str]]:
    """Return which processes use memory of each GPU, as far as this user may see them."""
    found: Dict[str, List[str]] = {}
    for uuid, pid, name, used in query("compute-apps", HOLDER_FIELDS, WAIT_S) or []:
        found.setdefault(uuid, []).append("%s (pid %s, %s MiB)" % (os.path.basename(name)[:80], pid, used))
    return found
