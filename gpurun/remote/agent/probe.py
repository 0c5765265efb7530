"""The first look around: the machine, its cards, its codecs, its torch, and what was shipped to it before."""

from __future__ import annotations

import glob
import json
import os
import platform
import shutil
import subprocess
import sys

from gpurun.remote.agent.decompress import codecs
from gpurun.remote.agent.finish_upload import shipped
from gpurun.remote.agent.gpu_use import figure, query
from gpurun.remote.agent.job_state import clocks_now
from gpurun.remote.agent.processes import environment
from gpurun.remote.agent.system import at, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional

    from gpurun.remote.agent.system import Answer, Json


def hello(root: str, options: Json) -> Answer:
    """What this machine is and has, and what time it is here, which is noted too."""
    torch = find_torch(root, options.get("python"))  # It may take minutes: the time is told after it.
    clocks = clocks_now()
    write(at(root, "agent", "clock.json"), clocks)
    return {
        "v": 1,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_free_bytes": shutil.disk_usage(root).free,
        "codecs": codecs(),
        "wall": clocks["wall"],
        "boot_id": clocks["boot_id"],
        "shipped_sha256": shipped(root).get("manifest_sha256"),
        "gpus": find_gpus(),
        "torch": torch,
    }, b""


FIELDS = ("name", "memory.total", "driver_version")
ECC_FIELD = "ecc.errors.uncorrected.volatile.total"
WAIT_S = 30


def find_gpus() -> List[Json]:
    """One entry a card; none where there is no nvidia-smi, or it does not answer."""
    for fields in ((*FIELDS, ECC_FIELD), FIELDS):  # not every driver knows the last
        rows = query("gpu", fields, WAIT_S)
        if rows is not None:
            return [gpu(row) for row in rows]
    return []


def gpu(words: List[str]) -> Json:
    """One row; a figure that the card does not have is None."""
    memory_mib = figure(words[1])
    return {
        "name": words[0][:200],
        "memory_bytes": None if memory_mib is None else memory_mib << 20,
        "driver": words[2][:200],
        "ecc_errors": figure(words[3]) if len(words) > 3 else None,
    }


PLACES = (
    # A distribution of conda, and its environments.
    *(
        f"{root}/{name}{env}/bin/python"
        for root in ("/opt", "~")
        for name in ("*conda*", "*forge*", "*mamba*", ".*mamba*")
        for env in ("", "/envs/*")
    ),
    *("/venv/*/bin/python", "/opt/venv/bin/python", "/workspace/*venv*/bin/python", "~/*venv*/bin/python"),
    *("~/*/.venv/bin/python", "/workspace/*/.venv/bin/python"),
    *("~/.venv/bin/python", "~/.pyenv/versions/*/bin/python", "/usr/local/bin/python3", "/usr/bin/python3"),
)
# It ends at once: to take torch's modules apart again takes a quarter of the time that to import them did.
PROBE = """
import json, os, torch
try:
    from numpy import __version__ as numpy
except ImportError:
    numpy = None
cuda = torch.cuda.is_available()
seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"version": torch.__version__, "numpy": numpy, "cuda": torch.version.cuda if cuda else None,
                  "devices": [{"name": d.name, "memory_bytes": d.total_memory} for d in seen]}), flush=True)
os._exit(0)
"""


def find_torch(root: str, asked: Optional[str]) -> Json:
    """The first Python with torch, one with CUDA if this machine has a GPU; remembered for `start`."""
    best: Json = {"found": False, "python": None, "version": None, "numpy": None, "cuda": None, "devices": []}
    usual = [sys.executable, shutil.which("python3") or "", "/opt/pytorch/bin/python"]
    for place in PLACES:
        usual += sorted(glob.glob(os.path.expanduser(place)))
    for python in dict.fromkeys([asked] if asked else filter(os.path.exists, usual)):
        try:
            told = subprocess.run(
                [python, "-c", PROBE], env=environment(), stdin=subprocess.DEVNULL, timeout=120,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
            ).stdout.splitlines()  # fmt: skip
            answer = dict(json.loads(told[-1]), found=True, python=python)
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            continue
        best = answer if answer["cuda"] or not best["found"] else best
        if best["cuda"] or not os.path.exists("/dev/nvidiactl"):
            break
    write(at(root, "agent", "python.json"), best)
    return best
