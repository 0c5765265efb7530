"""Checks, before anything is rented, that the machine will be able to start the command's first word."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from gpurun.core.command import NOTEBOOK, Command
from gpurun.core.errors import UsageError
from gpurun.core.paths import open_regular
from gpurun.core.places import place_kinds
from gpurun.core.run_plan import Mode, Request
from gpurun.jobs.commands.work_folder import WorkFolder
from gpurun.jobs.requirements import distributions, provided_by

_RUN_NOTEBOOKS = ("nbconvert", "ipykernel")
_OF_BASH = frozenset({"sh", "bash", "dash"})


@dataclass(frozen=True)
class StartableCommand:
    """A command that can be started, and the plan's notes about how it is started."""

    command: Command
    notes: tuple[str, ...] = ()


def make_startable(command: Command, found: WorkFolder) -> StartableCommand:
    """Return the command, changed if necessary so that it can be started. Raise UsageError if it cannot be."""
    first = command.argv[0]
    name = os.path.normpath(first)
    path = found.files.get(name)
    if path is None or first.endswith((".py", ".ipynb")):
        return StartableCommand(command)
    head, shell = _first_bytes(path), ""
    if head.startswith(b"#!"):
        shell = Path(head[2:].split()[-1].decode("utf-8", "replace") if head[2:].split() else "").name
    starts_itself = head.startswith((b"#!", b"\x7fELF"))
    others = tuple(other for other in command.executable if other != name)
    if first.endswith(".sh"):
        is_own = starts_itself and (name in command.executable or shell not in _OF_BASH)
        notes = () if is_own else (f"{first} is run by bash.",)
        return StartableCommand(command.model_copy(update={"executable": (*others, name) if is_own else others}), notes)
    if "/" not in first:
        if shutil.which(first) is not None:
            return StartableCommand(command)
        what = f"{first} is a file in the folder, but a program name without a / is looked up only in PATH."
        raise UsageError("run.not_started", what, hint=f"Write ./{first}, or name its interpreter: -- bash {first}")
    if not starts_itself:
        what = f"{first} is neither a Linux program nor a script that begins with #! and an interpreter."
        raise UsageError("run.not_started", what, hint=f"Name its interpreter: -- bash {shlex.quote(first)}")
    if name in command.executable:
        return StartableCommand(command)
    note = f"{first} is not executable here; gpurun makes it executable on the machine."
    return StartableCommand(command.model_copy(update={"executable": (*others, name)}), (note,))


def with_notebook(command: Command, request: Request, mode: Mode) -> tuple[Command, tuple[str, ...]]:
    """Return a notebook's command with nbconvert and ipykernel added to its requirements, and notes for the plan.

    On the user's own machine gpurun installs nothing without a flag. Raise UsageError if the packages may be missing on
    that machine.
    """
    notebook = command.argv[0]
    if not notebook.endswith(".ipynb"):
        return command, ()
    missing = [name for name in _RUN_NOTEBOOKS if not provided_by(name, command.pip)]
    flags = " ".join(f"--pip {name}" for name in missing)
    if mode is not Mode.PAID:
        missing = [name for name in missing if name not in distributions(missing)]
    if missing and mode is Mode.LOCAL:
        what = f"{notebook} is run by nbconvert, and {' and '.join(missing)} cannot be imported here."
        raise UsageError("run.notebook", what, hint=f"pip install {' '.join(missing)}; or rehearse it: --dry-run")
    is_theirs = bool(place_kinds(request.providers) & {"box", "cluster"}) and not request.dry_run
    if missing and is_theirs and not request.choices.setup:
        what = f"{notebook} is run by nbconvert, and gpurun installs nothing on your own machine unless you ask it to."
        hint = f"Add {flags}. If nbconvert is already installed on that machine: -- python {shlex.join(NOTEBOOK)} …."
        raise UsageError("run.notebook", what, hint=hint)
    runs = f"{notebook} is run by nbconvert; its output comes home in {notebook[:-6]}.nbconvert.ipynb."
    if not missing:
        return command, (runs,)
    flags = " ".join(f"--pip {name}" for name in missing)
    installed = f"gpurun installs nbconvert and ipykernel first, as if you had typed {flags}."
    return command.model_copy(update={"pip": (*command.pip, *missing)}), (runs, installed)


def _first_bytes(path: Path) -> bytes:
    """Return at most 200 bytes of a file's first line; empty if the file cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(200).split(b"\n")[0]
    except OSError:
        return b""
