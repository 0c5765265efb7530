"""The GPUs of this computer."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from gpurun.core.secrets import child_environment


@dataclass(frozen=True)
class CardHere:
    """A GPU of this computer, by the name that its NVIDIA driver gives; 0 MiB if the memory is not known."""

    name: str
    memory_mib: int


def cards_here() -> tuple[CardHere, ...]:
    """Return the GPUs that nvidia-smi lists, because only the trainer imports torch; () without such a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    words = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, env=child_environment(), capture_output=True, text=True, check=False)
    rows = [line.rpartition(",") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return tuple(
        CardHere(name.strip(), int(memory) if memory.strip().isdigit() else 0) for name, comma, memory in rows if comma
    )


def has_cuda() -> bool:
    """Return whether nvidia-smi lists a GPU."""
    return bool(cards_here())
