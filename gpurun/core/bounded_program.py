"""The trainer's own programs run here on files that somebody else made, within a bound of memory and time."""

from __future__ import annotations

import resource
import subprocess
from contextlib import suppress

from gpurun.core.errors import SetupError
from gpurun.core.installed_files import bundle_root
from gpurun.core.secrets import child_environment


def run_bounded(command: list[str], most_bytes: int, limit_s: float) -> tuple[int, str, str]:
    """Return the exit code and output of `python -m MODULE …`, which may take so much memory and time.

    SetupError where it takes longer. Only Linux bounds the memory.
    """
    root = bundle_root()  # Not the person's folder: a `trainer` that lies there would be run instead of ours.
    with subprocess.Popen(
        command,
        env=child_environment({"PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8"}),
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as child:
        try:
            if hasattr(resource, "prlimit"):
                with suppress(ProcessLookupError):  # It has ended already.
                    resource.prlimit(child.pid, resource.RLIMIT_DATA, (most_bytes, most_bytes))
            out, err = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            what = f"python -m {command[2]} was not done after {limit_s / 60:.0f} minutes, and was ended."
            hint = "Take a faster machine; of a sample fewer --tokens."
            raise SetupError("trainer.too_long", what, hint=hint) from None
        finally:
            child.kill()
    return child.returncode, out, err
