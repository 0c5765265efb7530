"""The first look around: the machine, its cards, its codecs, its torch, and what was shipped to it before."""

from __future__ import annotations

import os
import platform
import shutil
import time

from gpurun.machine.agent.clocks import boot_id
from gpurun.machine.agent.decompress import codecs
from gpurun.machine.agent.files import read
from gpurun.machine.agent.find_gpus import find_gpus
from gpurun.machine.agent.find_torch import find_torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpurun.machine.agent.protocol import Answer, Json


def hello(root: str, options: Json) -> Answer:
    """What this machine is and has."""
    return {
        "v": 1,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_free_bytes": shutil.disk_usage(root).free,
        "codecs": codecs(),
        "wall": time.time(),
        "boot_id": boot_id(),
        "shipped_sha256": (read(root, "agent", "shipped.json") or {}).get("manifest_sha256"),
        "gpus": find_gpus(),
        "torch": find_torch(root, options.get("python")),
    }, b""
