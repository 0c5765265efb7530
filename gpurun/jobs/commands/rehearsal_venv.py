"""Builds a rehearsal's virtual environment: the --pip packages, on top of the packages of gpurun's own Python."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from gpurun.core.errors import SetupError
from gpurun.core.filelock import exclusive
from gpurun.core.paths import Home, make_private
from gpurun.core.records import digest_json
from gpurun.core.secrets import child_environment
from gpurun.core.untrusted import safe_text

_COMPLETE = ".complete"
_PASSED_ON = ("PIP_*", "UV_*", "*_proxy", "*_PROXY", "SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables that configure package downloads. Cloud keys are not among them, because a build runs third-party code."""
_LAST_LINES, _LAST_CHARS = 12, 300


def venv_python(home: Home, lines: Sequence[str]) -> Path:
    """Return the path of the Python in the environment for these requirements. The environment may not be built yet."""
    of = {"lines": list(lines), "python": sys.executable, "version": sys.version}
    return home.cache / "venvs" / digest_json(of)[:16] / "bin" / "python"


def is_built(python: Path) -> bool:
    """Return whether the environment of this Python is complete."""
    return (python.parents[1] / _COMPLETE).exists()


def build_venv(python: Path, lines: Sequence[str], limit_s: float, say: Callable[[str], None]) -> None:
    """Build the environment unless it is complete. Raise SetupError, with the installer's last lines, if that fails."""
    place = python.parents[1]
    make_private(place.parent)
    with exclusive(place.with_suffix(".lock")):
        if is_built(python):
            return
        say(f"installing the --pip packages into {place}")
        shutil.rmtree(place, ignore_errors=True)
        _run_program([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(place)], limit_s)
        inside = next(place.glob("lib/python*/site-packages"))
        # A venv made from a venv sees only the packages of the original Python, so the folders of this Python are
        # added.
        own = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        lines_of_site = "".join(f"import site; site.addsitedir({path!r})\n" for path in own)
        (inside / "_of_gpurun.pth").write_text(lines_of_site)
        requirements = place / "requirements.txt"
        requirements.write_text("\n".join(lines) + "\n")
        _run_program([*_install_command(python, limit_s), "-q", "-r", str(requirements)], limit_s)
        (place / _COMPLETE).touch()


def _install_command(python: Path, limit_s: float) -> list[str]:
    """Return the command that installs packages for a Python: with pip, else uv, else Python's bundled pip."""
    if _can_run([sys.executable, "-m", "pip", "--version"]):
        return [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-input"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", str(python)]
    _run_program([str(python), "-m", "ensurepip"], limit_s)
    return [str(python), "-m", "pip", "install", "--no-input"]


def _can_run(command: Sequence[str]) -> bool:
    return subprocess.run(command, env=_child_environment(), capture_output=True, check=False).returncode == 0


def _run_program(command: Sequence[str], limit_s: float) -> None:
    """Run a program. Raise SetupError if it fails or takes longer than `limit_s`."""
    try:
        done = subprocess.run(
            command, env=_child_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=limit_s, check=False, cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = "Name fewer packages, or allow more time: --setup-limit MINUTES."
        raise SetupError("run.pip_failed", f"--pip could not be installed here: {error}.", hint=hint) from None
    if done.returncode:
        lines = [line for line in safe_text(done.stdout.decode("utf-8", "replace")) if line.strip()]
        words = "\n".join(line[:_LAST_CHARS] for line in lines[-_LAST_LINES:])
        what = f"The --pip packages could not be installed here. The installer's last lines:\n{words}"
        hint = "They would fail on the rented machine, too: change --pip."
        raise SetupError("run.pip_failed", what, hint=hint)


def _child_environment() -> dict[str, str]:
    """Return a child process's environment, with the variables that configure package downloads."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _PASSED_ON)
    }
    return child_environment(kept)
