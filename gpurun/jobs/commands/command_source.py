"""Reads the files that a command runs, to find the modules that they import and the files that they name."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from gpurun.core.command import Command
from gpurun.core.paths import read_regular
from gpurun.jobs.commands.python_source import PythonSource, is_file_name, read_notebook, read_python, read_shell

_PROGRAMS = (".py", ".sh", ".ipynb")
_MOST_FILES = 2_000
_MOST_FILE_BYTES = 4 << 20
_INSTALLS = re.compile(r"\b(pip3?|conda|mamba|uv)\b.{0,40}\b(install|add|sync)\b")
_LAUNCHERS_OF_MODULES = frozenset({"-m", "--module"})


@dataclass
class CommandSource:
    """The files and modules that a command's sources mention, each with the source that mentions it.

    A source is a file of the folder, or "" for the command line. `modules` are the imported files. `missing` are
    top-level modules that are not in the folder; those in `is_sure` are imported whenever the command runs. `elsewhere`
    are modules in subfolders that Python does not search. `installs_itself` means that the command installs packages,
    so a missing module may exist by the time it is imported.
    """

    files: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)
    constants: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    reads: dict[str, str] = field(default_factory=dict)
    writes: set[str] = field(default_factory=set)
    missing: dict[str, str] = field(default_factory=dict)
    is_sure: set[str] = field(default_factory=set)
    installs_itself: bool = False
    elsewhere: dict[str, tuple[str, str]] = field(default_factory=dict)

    def names(self, file: str) -> str | None:
        """Return the source that names this file of the folder; "" for the command line, None if no source names it."""
        place = PurePosixPath(file)
        ends = ["/".join(place.parts[start:]) for start in range(len(place.parts))]
        plain = self._plain
        for end in ends:  # A bare name counts only with a suffix, because many programs contain a word such as "train".
            if end in plain and ("/" in end or end == file or is_file_name(end)):
                return plain[end]
        if place.name in self._base_names:
            return self._base_names[place.name]
        for text, by in self._globs.items():
            if fnmatch.fnmatch(file, text) or place.match(text):
                return by
        return None

    def names_folder(self, file: str) -> tuple[str, str] | None:
        """Return (folder, source) if a source names a folder that contains the file; else None."""
        return next(((text, by) for text, by in self.folders.items() if _is_below(file, text)), None)

    @cached_property
    def _plain(self) -> dict[str, str]:
        return {os.path.normpath(text.strip("/")): by for text, by in self.constants.items()}

    @cached_property
    def _base_names(self) -> dict[str, str]:
        return {PurePosixPath(text).name: by for text, by in self._plain.items() if is_file_name(text)}

    @cached_property
    def _globs(self) -> dict[str, str]:
        return {text: by for text, by in self.constants.items() if "*" in text and "." in text and len(text) > 2}


def command_source(command: Command, root: Path) -> CommandSource:
    """Read a command's sources in the folder `root`, and return what they mention. Ignore unreadable files."""
    return _Reader(command, root).found


class _Reader:
    """Collects the imports and file names of one command's sources."""

    def __init__(self, command: Command, root: Path) -> None:
        self.found = CommandSource()
        self.root = root
        self.argv = command.argv
        places = command.env.get("PYTHONPATH", "").split(":")
        self.more = [os.path.normpath(place) for place in places if place and not os.path.isabs(place)]
        self.seen: set[tuple[str, bool]] = set()
        for word in command.argv:
            for text in {word, word.partition("=")[2]} - {""}:
                self.found.constants.setdefault(text, "")
                if "/" in text:
                    self.found.folders.setdefault(text, "")
        self._take_words(command.argv)

    def _take_words(self, words: tuple[str, ...] | list[str]) -> None:
        """Read the programs that these words of a command line start."""
        for before, word in zip(("", *words), words, strict=False):
            name = os.path.normpath(word)
            if before in _LAUNCHERS_OF_MODULES:
                for file in self._find_module_files(word, "."):
                    self._take_file(file, ".", is_sure=True)
            elif word.endswith(_PROGRAMS) and self._is_file(name):
                self._take_file(name, str(PurePosixPath(name).parent), is_sure=True)

    def _take_file(self, name: str, beside: str, *, is_sure: bool) -> None:
        """Read one file and the files that it imports or runs. Its imports are also searched in the folder `beside`."""
        if (name, is_sure) in self.seen or len(self.seen) > _MOST_FILES:
            return
        self.seen.add((name, is_sure))
        self.found.files.add(name)
        try:
            text = read_regular(self.root / name, _MOST_FILE_BYTES).decode("utf-8", "replace")
            self.found.installs_itself |= _INSTALLS.search(text) is not None
            if name.endswith(".sh"):
                words = read_shell(text)
                self.found.constants |= {word: name for word in words if word not in self.found.constants}
                self._take_words(words)
                return
            source = read_notebook(text) if name.endswith(".ipynb") else read_python(text)
        except (OSError, ValueError, SyntaxError, RecursionError):
            return
        self._take_texts(source, name)
        for module in source.imports:
            sure = is_sure and module.is_sure
            if module.level:
                self._take_relative(name, module.level, module.module, module.names, beside, sure)
            else:
                self._take_import(name, source, module.module, module.names, beside, sure)

    def _take_texts(self, source: PythonSource, name: str) -> None:
        """Add the text constants of one file."""
        found = self.found
        typed = {word.partition("=")[0] for word in self.argv}
        defaults = {text for text, options in source.defaults.items() if typed.isdisjoint(options)}
        found.writes |= source.writes
        for into, texts in (
            (found.constants, source.constants - source.writes),
            (found.folders, source.folders - source.writes),
            (found.reads, {text for text in source.reads | defaults if is_file_name(text)}),
        ):
            for text in sorted(texts):
                into.setdefault(text, name)

    def _take_import(
        self, by: str, source: PythonSource, module: str, names: tuple[str, ...], beside: str, is_sure: bool
    ) -> None:
        """Read the module of an absolute import, or record that it is missing."""
        top = module.split(".")[0]
        for place in dict.fromkeys([beside, *self.more]):
            if files := self._find_module_files(module, place, names):
                if (self.root / place / top).is_dir():
                    self.found.packages.add(os.path.normpath(f"{place}/{top}"))
                self.found.modules |= files
                for file in sorted(files):
                    self._take_file(file, beside, is_sure=is_sure)
                return
        if top in sys.stdlib_module_names or top == "__future__":
            return
        is_sure = is_sure and not source.searches_elsewhere
        if there := next((folder for folder in (".", "src") if self._find_module_files(top, folder)), ""):
            if is_sure:
                self.found.elsewhere.setdefault(top, (by, there))
            return
        self.found.missing.setdefault(top, by)
        if is_sure:
            self.found.is_sure.add(top)

    def _take_relative(
        self, by: str, level: int, module: str, names: tuple[str, ...], beside: str, is_sure: bool
    ) -> None:
        """Read the module of a relative import, which is in the file's own package."""
        package = PurePosixPath(by).parent
        for _ in range(level - 1):
            package = package.parent
        if module:
            files = self._find_module_files(module, str(package), names)
        else:
            files = {file for name in names if (file := self._find_module_file(f"{package}/{name}"))}
        self.found.modules |= files
        for file in sorted(files):
            self._take_file(file, beside, is_sure=is_sure)

    def _find_module_files(self, module: str, place: str, names: tuple[str, ...] = ()) -> set[str]:
        """Return the files that importing a module reads, looked up in the folder `place`; empty if it is not found."""
        parts, files = module.split("."), set[str]()
        for count in range(1, len(parts) + 1):
            stem = os.path.normpath("/".join([place, *parts[:count]]))
            files |= {
                file for file in (self._find_module_file(stem), self._find_module_file(f"{stem}/__main__")) if file
            }
        whole = "/".join([place, *parts])
        files |= {file for name in names if (file := self._find_module_file(os.path.normpath(f"{whole}/{name}")))}
        return files

    def _find_module_file(self, stem: str) -> str:
        """Return the file of a module by its path without a suffix; "" if there is no such file."""
        stem = os.path.normpath(stem)
        return next((name for name in (f"{stem}/__init__.py", f"{stem}.py") if self._is_file(name)), "")

    def _is_file(self, name: str) -> bool:
        return not os.path.isabs(name) and not name.startswith("..") and (self.root / name).is_file()


def _is_below(file: str, folder: str) -> bool:
    """Return whether `folder`, a path as the program names it, contains the file."""
    plain = os.path.normpath(folder)
    return plain not in (".", "..") and (file.startswith(f"{plain}/") or ("/" in plain and f"/{plain}/" in f"/{file}"))


def unknown_files(found: CommandSource, known: Collection[str], root: Path) -> dict[str, str]:
    """Return the files that the program reads but the folder lacks, each with the source that reads it."""
    bases = {PurePosixPath(name).name for name in known}
    written = {PurePosixPath(text).name for text in found.writes}
    return {
        text: by
        for text, by in found.reads.items()
        if not os.path.isabs(text) and "://" not in text and PurePosixPath(text).name not in bases | written
        and not (root / text).exists()
    }  # fmt: skip
