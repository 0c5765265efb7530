"""Warns about files and modules that a command needs and that will be missing on the machine."""

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
"""Modules that are installed for the Python that gpurun chooses on a machine."""


@dataclass(frozen=True)
class LeftOut:
    """A file that .gitignore leaves out. `by` is the source that names it: "" for the command, None if none does."""

    name: str
    bytes: int
    by: str | None

    @property
    def label(self) -> str:
        """Return the file's name and size, such as `train.bin (2 MB)`."""
        return f"{self.name} ({format_bytes(self.bytes)})"


def undecided_files(found: WorkFolder) -> list[LeftOut]:
    """Return the files that the user should decide about: named or large binary files that .gitignore leaves out.

    Files that --exclude leaves out are not among them, because the user has decided about those.
    """
    left: list[LeftOut] = []
    source, known = found.source, (*found.files, *found.hidden, *found.decided)
    # If the program names single files of a folder, it does not need the whole folder.
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


def refuse_undecided(left: Sequence[LeftOut]) -> None:
    """Raise UsageError if the upload lacks a file that the command or its program names.

    This is for when the user cannot be asked.
    """
    named = [file for file in left if file.by is not None]
    if not named:
        return
    more = f" (and {len(named) - 1} more)" if len(named) > 1 else ""
    what = f".gitignore leaves out {named[0].label}, which {named[0].by or 'the command'} names{more}."
    globs = _make_globs(file.name for file in named)
    raise UsageError(
        "run.left_out",
        what,
        hint=f"Upload it: {_format_flags('--include', globs)}. Or: {_format_flags('--exclude', globs)}",
    )


def left_out_warnings(left: Sequence[LeftOut]) -> Iterator[str]:
    """Yield a warning for each group of files left out, with the flags that upload or exclude them."""
    for by in dict.fromkeys(file.by for file in left):
        files = [file for file in left if file.by == by]
        globs = _make_globs(file.name for file in files)
        labels = ", ".join(file.label for file in files[:_MOST_NAMED])
        more = f" and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
        why = "large and binary" if by is None else f"though {by or 'the command'} names it"
        lines = ", ".join(f"!{glob}" for glob in globs)
        yield (
            f"Left out by .gitignore, {why}: {labels}{more}. To upload: {_format_flags('--include', globs)} "
            f"(or {lines} in .gpurunignore). If it is not needed: {_format_flags('--exclude', globs)}."
        )


def file_warnings(found: WorkFolder) -> Iterator[str]:
    """Yield a warning for each file that the program reads but the folder lacks."""
    known = {*found.files, *found.hidden, *found.decided}
    for text, by in sorted(unknown_files(found.source, known, found.root).items()):
        place = found.root.name or str(found.root)
        yield f"{by} reads {text}, but {place} has no such file: does the command create it?"
    for text, by in sorted(found.source.reads.items()):
        if os.path.isabs(text) and Path(text).exists() and Path.home() in Path(text).parents:
            yield f"{by} reads {text}, a path on this computer: upload it with --data, and read $GPURUN_DATA."
    for name in sorted(found.left_out):
        link = found.root / name
        if link.is_symlink() and link.is_dir() and (name in found.source.constants or name in found.source.folders):
            to = shlex.quote(str(link.resolve()))
            yield f"{name} is a link to a folder, which is not followed: use --data {to}, and read $GPURUN_DATA."


def import_warnings(found: WorkFolder, command: Command, *, python: str, is_rented: bool) -> Iterator[str]:
    """Yield a warning about each imported module that Python will not find on the machine, as far as is known."""
    source = found.source
    for module, (by, place) in sorted(source.elsewhere.items()):
        yield (
            f"{by} imports {module}, but Python does not search its place in the folder: add --env PYTHONPATH={place}, "
            f"or start it with python -m from the folder that has {module}."
        )
    nowhere = [name for name in sorted(source.missing) if name in source.is_sure]
    here = distributions(nowhere, python)
    nowhere = [name for name in nowhere if name not in here and not provided_by(name, command.pip)]
    if is_rented:
        nowhere = [name for name in nowhere if name not in _ALWAYS_THERE]
    if nowhere:
        by = source.missing[nowhere[0]]
        among = "and --pip does not name it" if command.pip else "and there is no --pip"
        them, names = ("it is", nowhere[0]) if len(nowhere) == 1 else ("they are", ", ".join(nowhere))
        may = " The machine may have it." if is_rented else ""
        yield f"{by} imports {names}: {them} not in the folder and not installed here, {among}.{may}"


def upload_notes(found: WorkFolder, command: Command, *, is_installed_there: bool) -> Iterator[str]:
    """Yield the plan's notes about parts of the upload that a user might not expect."""
    if found.along:
        labels = ", ".join(found.along[:_MOST_NAMED])
        more = f" and {len(found.along) - _MOST_NAMED} more" if len(found.along) > _MOST_NAMED else ""
        yield f"{command.argv[0]} imports or names files beside it, which are uploaded too: {labels}{more}."
    if found.words:
        yield f"Left out of the upload: {found.words}."
    requirements = found.root / "requirements.txt"
    if command.folder and is_installed_there and not command.pip and requirements.is_file():
        flag = f"--pip {shlex.quote(os.path.relpath(requirements))}"
        yield f"requirements.txt is not installed automatically: {flag} installs it before the upload."


def imports_of(found: WorkFolder, command: Command) -> tuple[str, ...]:
    """Return the top-level modules that the machine must have, because the command fails without them.

    Return () if another program chooses the Python (`uv run`, a shell script), or if the command installs packages
    itself.
    """
    is_direct = command.words[0] == "{python}" or command.argv[0] == "torchrun"
    if not is_direct or found.source.installs_itself:
        return ()
    return tuple(sorted(set(found.source.missing) & found.source.is_sure)[:MOST_IMPORTS])


def _make_globs(names: Iterable[str]) -> list[str]:
    """Return a few globs that match the files: one for each suffix and folder, or the plain name of a single file."""
    files = [PurePosixPath(name) for name in names]
    groups: dict[str, list[PurePosixPath]] = {}
    for file in files:
        kind = f"*{file.suffix}" if file.suffix else file.name
        groups.setdefault(f"{file.parts[0]}/**/{kind}" if len(file.parts) > 1 else kind, []).append(file)
    if len(groups) > _MOST_GLOBS:
        return list(dict.fromkeys(f"{file.parts[0]}/**" if len(file.parts) > 1 else file.name for file in files))
    return [glob if len(group) > 1 else str(group[0]) for glob, group in groups.items()]


def _format_flags(flag: str, globs: Iterable[str]) -> str:
    return " ".join(f"{flag} {shlex.quote(glob)}" for glob in globs)


def _is_binary(path: Path) -> bool:
    """Return whether a file begins with binary content."""
    try:
        with open_regular(path) as file:
            return b"\0" in file.read(8192)
    except OSError:
        return False
