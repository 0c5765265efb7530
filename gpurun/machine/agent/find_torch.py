"""Where on this machine torch is, asked of each Python in a process of its own."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys

from gpurun.machine.agent.files import at, write
from gpurun.machine.agent.processes import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from gpurun.machine.agent.protocol import Json

PLACES = (
    *(
        "/opt/*conda*/bin/python",
        "/opt/*conda*/envs/*/bin/python",
        "~/*conda*/bin/python",
        "~/*conda*/envs/*/bin/python",
    ),
    *("/venv/*/bin/python", "/opt/venv/bin/python", "/workspace/*venv*/bin/python", "~/*venv*/bin/python"),
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
