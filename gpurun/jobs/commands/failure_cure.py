"""Suggests how to fix a command that failed because a file or a module was missing."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from gpurun.core.command import Command
from gpurun.core.errors import UsageError
from gpurun.jobs.commands.work_folder import WorkFolder, work_folder
from gpurun.jobs.requirements import distribution_of

_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_NO_FILE = re.compile(r"No such file or directory: '([^'\n]+)'")


def failure_cure(message: str, command: Command | None) -> str:
    """Return how to fix the failure that `message` describes; "" if it names no missing file or module.

    The folder is read as it is now, and may have changed since the run was planned.
    """
    if command is None or not command.folder:
        return ""
    module, file = _NO_MODULE.search(message), _NO_FILE.search(message)
    with suppress(UsageError, OSError):
        if module:
            return _cure_for_module(module[1].split(".")[0], command)
        if file:
            return _cure_for_file(file[1], command, work_folder(command))
    return ""


def _cure_for_module(module: str, command: Command) -> str:
    """Return how to make a module available: --include or PYTHONPATH if the folder has it, else --pip."""
    root = Path(command.folder)
    root = root.parent if root.is_file() else root
    for name in (f"{module}.py", module, f"src/{module}"):
        if (root / name).exists():
            found = work_folder(command)
            if not any(file == name or file.startswith(f"{name}/") for file in found.files):
                return f"{name} is in {root} and was not uploaded: --include {shlex.quote(name)}."
            place = "src" if name.startswith("src/") else "."
            return f"{name} was uploaded; add --env PYTHONPATH={place} so that Python finds it."
    return f"Install it on the machine first: --pip {distribution_of(module)}."


def _cure_for_file(name: str, command: Command, found: WorkFolder) -> str:
    """Return how to upload a file: with --include if the folder has it, else with --data."""
    if os.path.isabs(name):
        is_here = Path(name).exists()
        return f"{name} is a path on this computer: upload it with --data, and read $GPURUN_DATA." if is_here else ""
    plain = os.path.normpath(name)
    is_sent = plain in found.files or any(file.startswith(f"{plain}/") for file in found.files)
    if is_sent or plain.startswith(".."):
        return ""
    if (found.root / plain).exists():
        return f"{plain} is in {found.root} and was not uploaded: --include {shlex.quote(plain)}."
    return f"{plain} is not in {found.root} either: create it first, or upload it with --data."
