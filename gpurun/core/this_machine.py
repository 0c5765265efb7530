"""What this machine itself has."""

from __future__ import annotations

import shutil
import subprocess

from gpurun.core.secrets import child_environment


def has_cuda() -> bool:
    """Return whether an NVIDIA driver answers; torch is the trainer's to import, not ours."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    return subprocess.run([tool, "-L"], env=child_environment(), capture_output=True, check=False).returncode == 0
