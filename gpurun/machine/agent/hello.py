"""The first look around: the machine, its cards, its codecs, its torch, and what was shipped to it before."""

from __future__ import annotations

import os
import platform
import shutil

from gpurun.machine.agent.decompress import codecs
from gpurun.machine.agent.files import at, write
from gpurun.machine.agent.find_gpus import find_gpus
from gpurun.machine.agent.find_torch import find_torch
from gpurun.machine.agent.shipped import shipped
from gpurun.machine.agent.state import clocks_now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpurun.machine.agent.protocol import Answer, Json


def hello(root: str, options: Json) -> Answer:
    """What this machine is and has, and what time it is here, which is noted too."""
    torch = find_torch(root, options.get("python"))  # It may take minutes: the time is told after it.
    clocks = clocks_now()
    write(at(root, "agent", "clock.json"), clocks)
    return {
        "v": 1,
        "python": platform.python_version(),
        "platform": platform.platform(),
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
