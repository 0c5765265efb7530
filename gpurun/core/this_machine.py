"""The hardware of this machine."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from gpurun.core.secrets import child_environment


@dataclass(frozen=True)
class CardHere:
    """A GPU as the NVIDIA driver here names it."""

    name: str
    memory_mib: int


def cards_here() -> tuple[CardHere, ...]:
    """Return the GPUs that an NVIDIA driver shows; only the trainer imports torch."""
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
    """Return whether an NVIDIA driver shows a GPU."""
    return bool(cards_here())
