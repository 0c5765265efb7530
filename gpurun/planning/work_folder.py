"""The folder that a command runs in: what of it is uploaded, and what is left out, with its size."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from gpurun.core.errors import UsageError
from gpurun.core.job import Command
from gpurun.core.paths import read_regular
from gpurun.core.secrets import child_environment
from gpurun.remote.archive import survey
from gpurun.view.number_format import format_bytes

IGNORE_FILES = (".gitignore", ".gpurunignore")
MOST_BYTES = 4_000_000_000
"""More is no program: data has --data, which goes by a bucket and is not sent again."""
MOST_LOOKED = 20_000
_NOBODYS = frozenset({".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache"})
"""What nobody misses, and is not named."""
_NEVER = frozenset({".venv", "venv", "node_modules"})
_SCRIPTS = (".py", ".sh")


@dataclass(frozen=True)
class WorkFolder:
    """The files that are uploaded, by their names below the folder; and what is left out, by name, with its bytes."""

    files: dict[str, Path]
    left_out: dict[str, int]

    @property
    def words(self) -> str:
        """What is left out, the largest first; "" where nothing is."""
        largest = sorted(self.left_out.items(), key=lambda pair: -pair[1])
        named = ", ".join(f"{name} ({format_bytes(size)})" for name, size in largest[:4])
        more = f" and {len(largest) - 4} more" if len(largest) > 4 else ""
        return f"{named}{more}"


def work_folder(command: Command) -> WorkFolder:
    """What a command's folder has, by .gitignore and .gpurunignore; a single script is all that its folder needs.

    UsageError where the script is not there, is left out or needs more than itself, or the folder is too large.
    """
    if not command.folder:
        return WorkFolder({}, {})
    root = Path(command.folder)
    if root.is_file():
        _refuse_siblings(root)
        return WorkFolder({root.name: root}, {})
    files, left_out = dict[str, Path](), dict[str, int]()
    for name, path, is_ignored in _walk(root, root, ()):
        if is_ignored or not path.is_file():  # Of links those to files are followed.
            left_out[name] = _size_below(path)
        else:
            files[name] = path
    _refuse_missing(command, root, files)
    _refuse_large(root, files)
    return WorkFolder(files, left_out)


def copied(command: Command, found: WorkFolder, into: Path) -> Command:
    """The command with the run's own copy of its folder at `into`, which later changes here do not touch.

    UsageError for what may not be uploaded, by its own path.
    """
    survey(found.files).demand_clean()
    executable = []
    for name, path in found.files.items():
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        executable += [name] if os.access(path, os.X_OK) else []
    into.mkdir(parents=True, exist_ok=True)
    return command.model_copy(update={"executable": tuple(executable), "commit": commit_of(command.folder)})


def commit_of(folder: str) -> str:
    """Return the commit that is checked out in a folder, or of a script beside it; "" where git knows none.

    `.git` is not uploaded, so the command is told it in GPURUN_GIT_COMMIT.
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


def _walk(root: Path, folder: Path, specs: tuple[tuple[Path, GitIgnoreSpec], ...]) -> Iterator[tuple[str, Path, bool]]:
    """Every file below, and every name that is left out with all below it."""
    for name in IGNORE_FILES:
        if (folder / name).is_file():
            lines = read_regular(folder / name).decode("utf-8", "replace").splitlines()
            specs = (*specs, (folder, GitIgnoreSpec.from_lines(lines)))
    for path in sorted(one for one in folder.iterdir() if one.name not in _NOBODYS):
        is_folder = path.is_dir() and not path.is_symlink()
        if path.name in _NEVER or _is_ignored(path, is_folder, specs):
            yield path.relative_to(root).as_posix(), path, True
        elif is_folder:
            yield from _walk(root, path, specs)
        else:
            yield path.relative_to(root).as_posix(), path, False


def _is_ignored(path: Path, is_folder: bool, specs: tuple[tuple[Path, GitIgnoreSpec], ...]) -> bool:
    """What the nearest file that speaks of it says."""
    for folder, spec in reversed(specs):
        told = spec.check_file(path.relative_to(folder).as_posix() + ("/" if is_folder else "")).include
        if told is not None:
            return told
    return False


def _size_below(path: Path) -> int:
    """The bytes of a file or of all below a folder; of a huge one those of the first files."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    size = 0
    for count, file in enumerate(path.rglob("*")):
        if count > MOST_LOOKED:
            break
        size += file.lstat().st_size if file.is_file() else 0
    return size


def _refuse_missing(command: Command, root: Path, files: dict[str, Path]) -> None:
    """UsageError for a script that is not uploaded, and for any other path of the command that is left out."""
    for word in command.argv:
        name = os.path.normpath(word)
        is_there = not os.path.isabs(word) and (root / name).exists()
        is_sent = name in files or any(one.startswith(f"{name}/") for one in files)
        if is_there and name != "." and not is_sent and not word.startswith("-"):
            what = f"{word} is left out of the upload by .gitignore or .gpurunignore."
            raise UsageError("run.ignored", what, hint=f"Add !{name} to {root / '.gpurunignore'}.")
        if not is_there and Path(word).suffix in _SCRIPTS and not word.startswith("-"):
            hint = "Name it as it is below the folder that is uploaded (--upload, else this one)."
            raise UsageError("run.no_script", f"There is no {word} in {root}.", hint=hint)


def _refuse_large(root: Path, files: dict[str, Path]) -> None:
    """UsageError for a folder that is no program, which says what is large in it."""
    sizes = Counter[str]()
    for name, path in files.items():
        sizes[name.split("/")[0]] += path.lstat().st_size
    if sizes.total() <= MOST_BYTES:
        return
    named = ", ".join(f"{name} ({format_bytes(size)})" for name, size in sizes.most_common(4))
    size, most = format_bytes(sizes.total()), format_bytes(MOST_BYTES)
    what = f"{root} holds {size}; at most {most} are uploaded. Large are {named}."
    hint = "Give data by --data PATH, and name what is not needed in .gpurunignore."
    raise UsageError("run.large", what, hint=hint)


def _refuse_siblings(script: Path) -> None:
    """UsageError for a script that imports what lies beside it: alone it would fail on paid time."""
    try:
        tree = ast.parse(read_regular(script))
    except (OSError, ValueError, SyntaxError) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        if script.suffix != ".py":
            return
        raise UsageError("run.not_python", f"{script} is no Python{where}: {error}.", hint="Mend it first.") from None
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in (one.split(".")[0] for one in names):
            if name and ((script.parent / f"{name}.py").is_file() or (script.parent / name / "__init__.py").is_file()):
                what = f"{script.name} imports {name}, which lies beside it and would not be uploaded."
                raise UsageError("run.needs_folder", what, hint="Upload the whole folder: --upload .")
