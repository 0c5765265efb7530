"""Runs a module of the trainer as a separate program: no key in its environment, bounded memory, bounded time.

The module reads files from a machine, or belongs to a trainer that the user changed. Its output is untrusted text.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpurun.core.installed_files import bundle_root
from gpurun.core.secrets import child_environment
from gpurun.core.untrusted import safe_line

REFUSED = 2


@dataclass(frozen=True)
class ProgramResult:
    """The exit code of a program, and its output."""

    code: int
    out: str
    err: str

    @property
    def last_lines(self) -> str:
        """Return the last three lines of its standard error as one line that is safe to print."""
        return safe_line(" ".join(self.err.strip().splitlines()[-3:])) or "it printed no error"

    @property
    def refusal(self) -> str:
        """Return the trainer's sentence that refuses its input, without the full stop; "" if it refused nothing."""
        last = (self.err.strip().splitlines() or [""])[-1]
        return safe_line(last).rstrip(".").partition("refused: ")[2] if self.code == REFUSED else ""


def run_module(
    module: str, arguments: Sequence[str], *, trainer: Path | None = None, most_bytes: int, limit_s: float
) -> ProgramResult:
    """Run `python -m MODULE` of the bundled trainer, or of the changed trainer in the folder `trainer`.

    Kill the program after `limit_s` and raise subprocess.TimeoutExpired. Its memory is bounded on Linux only.
    """
    with tempfile.TemporaryDirectory(prefix="gpurun-") as own:
        root = bundle_root()  # In the user's folder, a `trainer` there would run in place of the bundled one.
        if trainer is not None:
            root = Path(own)
            (root / "trainer").symlink_to(trainer.absolute(), target_is_directory=True)
        with subprocess.Popen(
            [sys.executable, "-B", "-m", module, *arguments],
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
                    with suppress(ProcessLookupError):  # The program has ended already.
                        resource.prlimit(child.pid, resource.RLIMIT_DATA, (most_bytes, most_bytes))
                out, err = child.communicate(timeout=limit_s)
            finally:
                child.kill()
    return ProgramResult(child.returncode, out, err)
