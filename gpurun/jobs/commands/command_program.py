"""Decides how the first word of a command is started, before anything is rented for it."""

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
    """A command that can be started as it is, and what the plan says of that."""

    command: Command
    notes: tuple[str, ...] = ()


def startable(command: Command, found: WorkFolder) -> StartableCommand:
    """Return the command with what its first word needs there; UsageError for a file that nothing would start."""
    first = command.argv[0]
    name = os.path.normpath(first)
    path = found.files.get(name)
    if path is None or first.endswith((".py", ".ipynb")):
        return StartableCommand(command)
    head, shell = _head(path), ""
    if head.startswith(b"#!"):
        shell = Path(head[2:].split()[-1].decode("utf-8", "replace") if head[2:].split() else "").name
    starts_itself = head.startswith((b"#!", b"\x7fELF"))
    others = tuple(other for other in command.executable if other != name)
    if first.endswith(".sh"):
        is_own = starts_itself and (name in command.executable or shell not in _OF_BASH)
        said = () if is_own else (f"{first} is run by bash.",)
        return StartableCommand(command.model_copy(update={"executable": (*others, name) if is_own else others}), said)
    if "/" not in first:
        if shutil.which(first) is not None:
            return StartableCommand(command)
        what = f"{first} is a file of the folder, and a program without a / is looked for in PATH alone."
        raise UsageError("run.not_started", what, hint=f"Write ./{first}; or name what runs it: -- bash {first}")
    if not starts_itself:
        what = f"{first} is neither a program of Linux nor a script whose first line is #! and an interpreter."
        raise UsageError("run.not_started", what, hint=f"Name what runs it: -- bash {shlex.quote(first)}")
    if name in command.executable:
        return StartableCommand(command)
    note = f"{first} is not executable here; it is made so there."
    return StartableCommand(command.model_copy(update={"executable": (*others, name)}), (note,))


def with_notebook(command: Command, request: Request, mode: Mode) -> tuple[Command, tuple[str, ...]]:
    """Return a command with what runs a notebook among its requirements, and what the plan says of that.

    Nothing is installed unasked on a machine of the user's own: UsageError where it is not known to be there.
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
        what = f"{notebook} is run by nbconvert there, and nothing is installed on a machine of yours unasked."
        raise UsageError("run.notebook", what, hint=f"Add {flags}. If it is there: -- python {shlex.join(NOTEBOOK)} ….")
    said = (
        f"{notebook} is run by nbconvert; its log is in the notebook that comes home, {notebook[:-6]}.nbconvert.ipynb."
    )
    if not missing:
        return command, (said,)
    flags = " ".join(f"--pip {name}" for name in missing)
    installed = f"What that needs is installed first, as by {flags}."
    return command.model_copy(update={"pip": (*command.pip, *missing)}), (said, installed)


def _head(path: Path) -> bytes:
    """The first line of a file, as far as it matters."""
    try:
        with open_regular(path) as file:
            return file.read(200).split(b"\n")[0]
    except OSError:
        return b""
