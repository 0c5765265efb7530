"""Says what a command will miss on the machine: files that are left out, files and modules that are nowhere."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpurun.core.command import Command
from gpurun.core.errors import UsageError
from gpurun.core.paths import open_regular
from gpurun.jobs.commands.command_source import unknown_files
from gpurun.jobs.commands.work_folder import WorkFolder
from gpurun.jobs.requirements import distributions, provided_by
from gpurun.remote.archive import is_named_like_secret
from gpurun.view.number_format import format_bytes

LARGE_BYTES = 100_000
MOST_IMPORTS = 200
_MOST_NAMED, _MOST_GLOBS = 4, 4
_ALWAYS_THERE = frozenset({"torch", "numpy"})
"""What the Python has that gpurun looks for on a machine."""


@dataclass(frozen=True)
class LeftOut:
    """A file that .gitignore leaves out: named `by` a file, or by the command (""); large and binary where None."""

    name: str
    bytes: int
    by: str | None

    @property
    def label(self) -> str:
        """`train.bin (2 MB)`."""
        return f"{self.name} ({format_bytes(self.bytes)})"


def undecided(found: WorkFolder) -> list[LeftOut]:
    """Return what .gitignore leaves out although it is named, or large and binary, and --exclude does not name."""
    left: list[LeftOut] = []
    source, known = found.source, (*found.files, *found.hidden, *found.decided)
    # A folder of which the program names single files is not meant whole.
    in_part = {folder[0] for name in known if source.names(name) is not None and (folder := source.names_folder(name))}
    for name, path in sorted(found.hidden.items()):
        if is_named_like_secret(PurePosixPath(name).name):
            continue
        size, by = path.stat().st_size, source.names(name)
        folder = source.names_folder(name)
        by = folder[1] if by is None and folder and folder[0] not in in_part else by
        if by is not None or (size > LARGE_BYTES and _is_binary(path)):
            left.append(LeftOut(name, size, by))
    return left


def demand_decided(left: Sequence[LeftOut]) -> None:
    """UsageError where something is left out that the command or its program names: nothing asks about it later."""
    named = [file for file in left if file.by is not None]
    if not named:
        return
    more = f" (and {len(named) - 1} more)" if len(named) > 1 else ""
    what = f"{named[0].label} is left out by .gitignore, and {named[0].by or 'the command'} names it{more}."
    globs = _globs(file.name for file in named)
    raise UsageError(
        "run.left_out", what, hint=f"Upload it: {_flags('--include', globs)}. Or: {_flags('--exclude', globs)}"
    )


def left_out_warnings(left: Sequence[LeftOut]) -> Iterator[str]:
    """Yield what is left out for each file that names it, and what is large, with the line that lets it in."""
    for by in dict.fromkeys(file.by for file in left):
        files = [file for file in left if file.by == by]
        globs = _globs(file.name for file in files)
        labels = ", ".join(file.label for file in files[:_MOST_NAMED])
        more = f" and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
        why = "large and binary" if by is None else f"though {by or 'the command'} names it"
        lines = ", ".join(f"!{glob}" for glob in globs)
        yield (
            f"Left out by .gitignore, {why}: {labels}{more}. To upload: {_flags('--include', globs)} "
            f"(or {lines} in .gpurunignore). If it is not needed: {_flags('--exclude', globs)}."
        )


def file_warnings(found: WorkFolder) -> Iterator[str]:
    """Yield what the program reads and the folder does not have."""
    known = {*found.files, *found.hidden, *found.decided}
    for text, by in sorted(unknown_files(found.source, known, found.root).items()):
        place = found.root.name or str(found.root)
        yield f"{by} reads {text}, and no file of that name is in {place}: does the command itself make it?"
    for text, by in sorted(found.source.reads.items()):
        if os.path.isabs(text) and Path(text).exists() and Path.home() in Path(text).parents:
            yield f"{by} reads {text}, a path of this computer: the machine has it by --data, at $GPURUN_DATA."
    for name in sorted(found.left_out):
        link = found.root / name
        if link.is_symlink() and link.is_dir() and (name in found.source.constants or name in found.source.folders):
            to = shlex.quote(str(link.resolve()))
            yield f"{name} is a link to a folder, and is not followed: --data {to}, found at $GPURUN_DATA."


def import_warnings(found: WorkFolder, command: Command, *, python: str, is_rented: bool) -> Iterator[str]:
    """Yield which modules are in no place that can be seen from here; the machine may have them."""
    source = found.source
    for module, (by, place) in sorted(source.elsewhere.items()):
        yield (
            f"{by} imports {module}, which lies in the folder where Python does not look for it: "
            f"--env PYTHONPATH={place}, or start it by python -m from the folder that has {module}."
        )
    nowhere = [name for name in sorted(source.missing) if name in source.is_sure]
    here = distributions(nowhere, python)
    nowhere = [name for name in nowhere if name not in here and not provided_by(name, command.pip)]
    if is_rented:
        nowhere = [name for name in nowhere if name not in _ALWAYS_THERE]
    if nowhere:
        by = source.missing[nowhere[0]]
        among = "and no line of --pip has its name" if command.pip else "and there is no --pip"
        them, names = ("it is", nowhere[0]) if len(nowhere) == 1 else ("they are", ", ".join(nowhere))
        may = " The machine may have it." if is_rented else ""
        yield f"{by} imports {names}: {them} not in the folder and not installed here, {among}.{may}"


def notes(found: WorkFolder, command: Command, *, is_installed_there: bool) -> Iterator[str]:
    """Yield what is not obvious of the upload."""
    if found.along:
        labels = ", ".join(found.along[:_MOST_NAMED])
        more = f" and {len(found.along) - _MOST_NAMED} more" if len(found.along) > _MOST_NAMED else ""
        yield f"{command.argv[0]} imports or names what lies beside it, so that goes along: {labels}{more}."
    if found.words:
        yield f"Left out of the upload: {found.words}."
    wanted = found.root / "requirements.txt"
    if command.folder and is_installed_there and not command.pip and wanted.is_file():
        flag = f"--pip {shlex.quote(os.path.relpath(wanted))}"
        yield f"Nothing installs what requirements.txt names: {flag} does, before the upload."


def imports_of(found: WorkFolder, command: Command) -> tuple[str, ...]:
    """Return the top-level modules that the machine must have; without them the command fails at once.

    None where another program chooses the Python (`uv run`, a shell script), or the command installs packages itself.
    """
    is_direct = command.words[0] == "{python}" or command.argv[0] == "torchrun"
    if not is_direct or found.source.installs_itself:
        return ()
    return tuple(sorted(set(found.source.missing) & found.source.is_sure)[:MOST_IMPORTS])


def _globs(names: Iterable[str]) -> list[str]:
    """Return few globs that match the files: each by its name, those of a kind and a folder together."""
    files = [PurePosixPath(name) for name in names]
    groups: dict[str, list[PurePosixPath]] = {}
    for file in files:
        kind = f"*{file.suffix}" if file.suffix else file.name
        groups.setdefault(f"{file.parts[0]}/**/{kind}" if len(file.parts) > 1 else kind, []).append(file)
    if len(groups) > _MOST_GLOBS:
        return list(dict.fromkeys(f"{file.parts[0]}/**" if len(file.parts) > 1 else file.name for file in files))
    return [glob if len(group) > 1 else str(group[0]) for glob, group in groups.items()]


def _flags(flag: str, globs: Iterable[str]) -> str:
    return " ".join(f"{flag} {shlex.quote(glob)}" for glob in globs)


def _is_binary(path: Path) -> bool:
    """Whether the beginning of a file is not text."""
    try:
        with open_regular(path) as file:
            return b"\0" in file.read(8192)
    except OSError:
        return False
