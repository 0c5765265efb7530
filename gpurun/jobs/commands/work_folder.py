"""Decides which files of a command's folder are uploaded, and lists what is left out with its size."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pathspec import GitIgnoreSpec

from gpurun.core.command import Command
from gpurun.core.errors import UsageError
from gpurun.core.paths import read_regular
from gpurun.core.secrets import child_environment
from gpurun.jobs.commands.command_source import CommandSource, command_source
from gpurun.jobs.commands.python_source import is_file_name, read_python
from gpurun.remote.archive import MOST_FILES, is_named_like_secret, secret_in, survey
from gpurun.view.number_format import format_bytes

GIT, OWN = ".gitignore", ".gpurunignore"
MOST_BYTES = 4_000_000_000
"""The largest folder that is uploaded. More than this is data, for which --data is better: nothing is sent twice."""
MOST_LOOKED = 20_000
MOST_BESIDE_BYTES, MOST_BESIDE_FILES = 20_000_000, 1_000
"""The largest folder that is uploaded together with a single script."""
_NOBODYS = frozenset({".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache"})
"""Files and folders that are left out without a note, because programs do not need them."""
_NEVER = frozenset({".venv", "venv", "node_modules"})
_SCRIPTS = (".py", ".sh", ".ipynb")
_TEMPLATE = re.compile(r".*[._-](example|sample|template|dist)", re.IGNORECASE)

Admit = Callable[[str], bool | None]
"""Asks the user whether to upload a file that is named like a key. Returns None if the user cannot be asked."""


@dataclass(frozen=True)
class WorkFolder:
    """The files to upload, keyed by their path below `root`, and the size in bytes of each file or folder left out.

    `hidden` are the files that .gitignore leaves out, except those in environments. `decided` are the files that the
    user leaves out with --exclude or .gpurunignore. `along` are the files that are uploaded with a single script.
    """

    files: dict[str, Path]
    left_out: dict[str, int]
    hidden: dict[str, Path] = field(default_factory=dict)
    decided: tuple[str, ...] = ()
    along: tuple[str, ...] = ()
    root: Path = Path()
    source: CommandSource = field(default_factory=CommandSource)

    @property
    def words(self) -> str:
        """Return a phrase that lists what is left out, the largest first; "" if nothing is left out."""
        largest = sorted(self.left_out.items(), key=lambda pair: -pair[1])
        named = ", ".join(f"{name} ({format_bytes(size)})" for name, size in largest[:4])
        more = f" and {len(largest) - 4} more" if len(largest) > 4 else ""
        return f"{named}{more}"


def work_folder(command: Command, home: Path | None = None) -> WorkFolder:
    """Return the files to upload from a command's folder, as selected by the ignore files, --include and --exclude.

    If the command names a single script and no folder, these are the script and the files beside it that it imports or
    names. gpurun's own `home` is never uploaded. Raise UsageError if the script is missing or left out, or if the
    folder is too large.
    """
    if not command.folder:
        return WorkFolder({}, {})
    root = Path(command.folder)
    if root.is_file():
        return _script_with_its_files(command, root, home)
    _refuse_place(root)
    walk = _Walk(root, command, home)
    walk.enter(root)
    _refuse_missing(command, root, walk)
    _refuse_large(root, walk.files)
    source = command_source(command, root)
    return WorkFolder(
        files=walk.files,
        left_out=walk.left_out,
        hidden=walk.hidden,
        decided=tuple(walk.decided),
        root=root,
        source=source,
    )


def without_keys(command: Command, found: WorkFolder, admit: Admit = lambda _: None) -> tuple[Command, WorkFolder]:
    """Return the command and the folder after deciding whether to upload each file that looks like a key.

    For a template that is named like a key, such as `.env.example`, `admit` asks the user. Raise UsageError for a file
    about which nothing is decided.
    """
    names = {str(path.resolve()): name for name, path in found.files.items()}
    allowed = [path for path, name in names.items() if name in command.include]
    for refusal in survey(found.files, allowed).refusals:
        name = names.get(refusal.path, refusal.path)
        what, leave = (
            f"{refusal.path} is not uploaded: {refusal.reason}.",
            f"Leave it out: --exclude {shlex.quote(name)}.",
        )
        if refusal.code != "pack.secret":
            raise UsageError(refusal.code, what, hint=leave)
        is_template = _TEMPLATE.fullmatch(name) is not None and not secret_in([read_regular(found.files[name])])
        answer = admit(name) if is_template else None
        if answer is None:
            if_none = f"If it is not a key: --include {shlex.quote(name)}."
            raise UsageError(
                refusal.code, what, hint=f"{leave} {if_none} A value that the command needs: --secret NAME."
            )
        if answer:
            command = command.model_copy(update={"include": (*command.include, name)})
        else:
            found = replace(found, files={other: path for other, path in found.files.items() if other != name})
    return command, found


def copy_work_folder(command: Command, found: WorkFolder, into: Path) -> Command:
    """Copy the files to `into`, so that later changes do not affect the run.

    Return the command with its executable files and the folder's commit.
    """
    executable = []
    for name, path in found.files.items():
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        if os.access(path, os.X_OK):
            executable.append(name)
    into.mkdir(parents=True, exist_ok=True)
    return command.model_copy(update={"executable": tuple(executable), "commit": commit_of(command.folder)})


def commit_of(folder: str) -> str:
    """Return the git commit that is checked out in a folder (for a script, in its folder); "" if there is none.

    `.git` is not uploaded, so the command gets the commit in GPURUN_GIT_COMMIT.
    """
    if not folder:
        return ""
    place = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(place), "rev-parse", "--verify", "--quiet", "HEAD"], env=child_environment(),
            stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    found = done.stdout.decode("ascii", "replace").strip()
    return found if re.fullmatch(r"[0-9a-f]{40,64}", found) else ""


def refuse_unmatched_include(command: Command, found: WorkFolder, data: Path | None) -> None:
    """Raise UsageError for an --include that matches no file, because the file would be missing on the machine."""
    for glob in command.include:
        spec = GitIgnoreSpec.from_lines([glob])
        if not any(map(spec.match_file, found.files)) and not (data and (data / glob).is_file()):
            what = f"--include {glob!r} matches no file in {found.root} that can be uploaded."
            raise UsageError("run.include", what, hint="Caches, environments and links to folders are never uploaded.")


class _Walk:
    """Walks through a folder once. Each file is either taken, or recorded with the reason why it is left out."""

    def __init__(self, root: Path, command: Command, home: Path | None, most_files: int = MOST_FILES) -> None:
        self.root, self.home, self.most_files = root, home, most_files
        self.files = dict[str, Path]()
        self.left_out = dict[str, int]()
        self.hidden = dict[str, Path]()
        self.decided: list[str] = []
        self.include, self.exclude = (GitIgnoreSpec.from_lines(globs) for globs in (command.include, command.exclude))
        self._git: list[tuple[Path, GitIgnoreSpec]] = []
        self._own: list[tuple[Path, GitIgnoreSpec]] = []

    def enter(self, folder: Path) -> None:
        """Walk through a folder that is not left out."""
        git, own = len(self._git), len(self._own)
        for name, specs in ((GIT, self._git), (OWN, self._own)):
            if (folder / name).is_file():
                lines = read_regular(folder / name).decode("utf-8", "replace").splitlines()
                specs.append((folder, GitIgnoreSpec.from_lines(lines)))
        for path in sorted(folder.iterdir()):
            if path.name in _NOBODYS or path == self.home:
                continue
            name, is_folder = path.relative_to(self.root).as_posix(), path.is_dir() and not path.is_symlink()
            why = "" if path.name in _NEVER else self.why(path, is_folder)
            if path.name in _NEVER:
                self.left_out[name] = _size_below(path)
            elif is_folder and why:
                self._look_below(name, path, why)
            elif is_folder:
                self.enter(path)
            elif why or not path.is_file():  # Links are followed only to files.
                self.left_out[name] = path.lstat().st_size
                self._hide(name, path, why)
            else:
                self._take_file(name, path)
        del self._git[git:], self._own[own:]

    def why(self, path: Path, is_folder: bool = False) -> str:
        """Return what leaves a path out: --exclude, .gpurunignore or .gitignore; "" if the path is uploaded."""
        name = path.relative_to(self.root).as_posix() + ("/" if is_folder else "")
        if self.exclude.match_file(name):
            return "--exclude"
        if self.include.match_file(name):
            return ""
        own, git = _is_ignored(path, is_folder, self._own), _is_ignored(path, is_folder, self._git)
        if own is not None:
            return OWN if own else ""
        return GIT if git else ""

    def _look_below(self, folder: str, place: Path, why: str) -> None:
        """Measure a folder that is left out, but take the files in it that --include or .gpurunignore select."""
        size, may_let_in = 0, bool(len(self.include.patterns) or self._own)
        for count, path in enumerate(_files_below(place, self.home)):
            if count > MOST_LOOKED and not may_let_in:  # Only the first files of a huge folder are measured.
                break
            name = path.relative_to(self.root).as_posix()
            is_let_in = self.include.match_file(name) or _is_ignored(path, False, self._own) is False
            if is_let_in and not self.exclude.match_file(name) and path.is_file():
                self._take_file(name, path)
                continue
            size += path.lstat().st_size
            self._hide(name, path, why)
        self.left_out[folder] = size

    def _hide(self, name: str, path: Path, why: str) -> None:
        if why == GIT and path.is_file():
            self.hidden[name] = path
        elif why:
            self.decided.append(name)

    def _take_file(self, name: str, path: Path) -> None:
        self.files[name] = path
        if len(self.files) > self.most_files:
            what = f"{self.root} holds more than {self.most_files:,} files."
            hint = "Pass data with --data PATH, and leave out what is not needed, in .gpurunignore or with --exclude."
            raise UsageError("run.too_many", what, hint=hint)


def _is_ignored(path: Path, is_folder: bool, specs: list[tuple[Path, GitIgnoreSpec]]) -> bool | None:
    """Return whether the path is ignored, by the nearest ignore file with a matching pattern; None if none matches."""
    for folder, spec in reversed(specs):
        ignored = spec.check_file(path.relative_to(folder).as_posix() + ("/" if is_folder else "")).include
        if ignored is not None:
            return ignored
    return None


def _files_below(folder: Path, home: Path | None) -> Iterator[Path]:
    """Yield all files below a folder, without following links and without caches and environments."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOBODYS | _NEVER and Path(place, name) != home)
        yield from (Path(place, name) for name in sorted(files))


def _size_below(path: Path) -> int:
    """Return the size in bytes of a file or folder; for a huge folder, the size of its first files."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    size = 0
    for count, file in enumerate(path.rglob("*")):
        if count > MOST_LOOKED:
            break
        size += file.lstat().st_size if file.is_file() else 0
    return size


def _script_with_its_files(command: Command, script: Path, home: Path | None) -> WorkFolder:
    """Return a single script and the files beside it that the script or --include names."""
    root = script.parent
    _refuse_broken(script)
    source = command_source(command, root)
    names = {script.name, *source.modules}
    for text in source.constants:
        name = os.path.normpath(text)
        is_beside = not os.path.isabs(name) and not name.startswith("..") and ("/" in text or is_file_name(name))
        if is_beside and (root / name).is_file() and not is_named_like_secret(Path(name).name):
            names.add(name)
    walk = _Walk(root, command, home)
    for name in sorted({*source.packages, *(os.path.normpath(text) for text in source.folders)}):
        place = root / name
        if os.path.isabs(name) or name.startswith(".") or not place.is_dir():
            continue
        small = _small_folder(root, command, home, place)
        names |= set(small)
        if not small and name not in source.packages:
            walk.left_out[name] = _size_below(place)
    if command.include:
        _refuse_place(root)
        for path in _files_below(root, home):
            name = path.relative_to(root).as_posix()
            if walk.include.match_file(name) and path.is_file():
                names.add(name)
    files = {name: root / name for name in sorted(names) if not walk.exclude.match_file(name) or name == script.name}
    _refuse_large(root, files)
    along = tuple(name for name in files if name != script.name)
    return WorkFolder(files=files, left_out=walk.left_out, along=along, root=root, source=source)


def _small_folder(root: Path, command: Command, home: Path | None, place: Path) -> dict[str, Path]:
    """Return the files below a folder if it is small enough to be uploaded with a script; else an empty dict."""
    walk = _Walk(root, command, home, MOST_BESIDE_FILES)
    try:
        walk.enter(place)
    except UsageError:
        return {}
    size = sum(path.lstat().st_size for path in walk.files.values())
    return walk.files if size <= MOST_BESIDE_BYTES else {}


def _refuse_place(root: Path) -> None:
    """Raise UsageError if the folder to upload is the user's home folder, or contains it."""
    place, own = root.resolve(), Path.home().resolve()
    if place == own or place in own.parents or place.parent == place:
        label = "your home folder" if place == own else "a folder above your home folder"
        what = f"{root} is {label}, and gpurun would upload all of it."
        raise UsageError("run.upload", what, hint="Name the folder of the program: --upload DIR, or cd there first.")


def _refuse_missing(command: Command, root: Path, walk: _Walk) -> None:
    """Raise UsageError if a path in the command is left out of the upload, or a script does not exist."""
    for word in command.argv:
        name = os.path.normpath(word)
        is_there = not os.path.isabs(word) and (root / name).exists()
        is_sent = name in walk.files or any(file.startswith(f"{name}/") for file in walk.files)
        is_decided = walk.exclude.match_file(name)
        if is_there and name != "." and not is_sent and not is_decided and not word.startswith("-"):
            if (root / name).is_dir() and name not in walk.left_out:
                continue  # It is an empty folder.
            what = f"The command names {word}, which is left out of the upload."
            hint = (
                f"Upload it: --include {name!r} (or !{name} in .gpurunignore). If it is not needed: --exclude {name!r}"
            )
            raise UsageError("run.ignored", what, hint=hint)
        # A script is named as a single word, not as in `sh -c '… train.py'`.
        is_script = Path(word).suffix in _SCRIPTS and not re.search(r"\s", word)
        if not is_there and is_script and not word.startswith("-"):
            hint = "Give its path relative to the uploaded folder (--upload, or this folder)."
            raise UsageError("run.no_script", f"There is no {word} in {root}.", hint=hint)


def _refuse_large(root: Path, files: dict[str, Path]) -> None:
    """Raise UsageError, which lists the largest entries, if a folder is larger than MOST_BYTES."""
    sizes = Counter[str]()
    for name, path in files.items():
        sizes[name.split("/")[0]] += path.lstat().st_size
    if sizes.total() <= MOST_BYTES:
        return
    large = [(name, size) for name, size in sizes.most_common(4) if 100 * size >= sizes.total()]
    named = ", ".join(f"{name} ({format_bytes(size)})" for name, size in large)
    size, most = format_bytes(sizes.total()), format_bytes(MOST_BYTES)
    what = f"{root} holds {size}; gpurun uploads at most {most}. The largest: {named}."
    hint = "Pass data with --data PATH, and list what is not needed in .gpurunignore."
    raise UsageError("run.large", what, hint=hint)


def _refuse_broken(script: Path) -> None:
    """Raise UsageError if a script has a syntax error."""
    if script.suffix != ".py":
        return
    try:
        read_python(read_regular(script).decode("utf-8", "replace"))
    except (OSError, ValueError, SyntaxError) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        what = f"{script} is not valid Python{where}: {error}."
        raise UsageError("run.not_python", what, hint="Fix it first.") from None
