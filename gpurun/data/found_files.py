"""Finds the files of a source: one file, or the files in a folder, an archive or a data set of the hub."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.core.errors import UsageError
from gpurun.data import hub
from gpurun.data.archive_members import ARCHIVE_SUFFIXES, members_of
from gpurun.data.kinds import kind_of_zip
from gpurun.data.refusals import Say, unreadable
from gpurun.data.shard_folder import refuse_undescribed_shards
from gpurun.data.source_names import HUB, STDLIB
from gpurun.data.streams import plain_name

_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__"}
"""Folders of the standard library that are left out: third-party code, tests (not always installed), and tables."""


@dataclass(frozen=True)
class FoundFiles:
    """The kind of a source ("stdlib", "file", "folder", "archive", "hub"), and the names of its files below `root`.

    `names` are in the order of reading; `passed` counts the skipped files by reason.
    """

    kind: str
    root: Path
    names: list[str]
    passed: Counter[str]


def find_files(source: str, say: Say) -> FoundFiles:
    """Find the files of a source; UsageError if it does not exist or is not text."""
    if source.startswith(HUB):
        return FoundFiles("hub", *hub.download_files(source.removeprefix(HUB), say), Counter())
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        names, passed = _walk(root, _NOT_PROSE)
        return FoundFiles(STDLIB, root, [n for n in names if n.endswith(".py") and "_sysconfigdata" not in n], passed)
    path = Path(source).expanduser()
    if not path.exists():
        hint = f"Check the path, or use the text that is always available: {STDLIB}."
        raise UsageError("data.missing", f"There is no file or folder {source}.", hint=hint)
    refuse_undescribed_shards(path)
    if path.is_file():
        found = FoundFiles("file", path.parent, [path.name], Counter())
        return _expand_archives(replace(found, kind="archive")) if _is_archive(path) else found
    if not path.is_dir():
        what = f"{source} is neither a file nor a folder."
        raise UsageError("data.not_a_file", what, hint="Name a text file, or a folder of text files.")
    if (path / "data.json").is_file():
        raise UsageError(
            "data.already_prepared",
            f"{source} contains prepared shards (it has a data.json).",
            hint="Pass that folder with --data, or name the folder of texts that it was made from.",
        )
    return _expand_archives(FoundFiles("folder", path, *_walk(path, set())))


def _is_archive(path: Path) -> bool:
    """Return whether a file is an archive to look into; False for office documents and models, which are also zips."""
    try:
        found = members_of(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return found is not None and (found.kind == "tar" or kind_of_zip(path) == "zip archive")


def _expand_archives(found: FoundFiles) -> FoundFiles:
    """Return the found files with each archive replaced by its members, in order."""
    names, passed = [], Counter(found.passed)
    for name in found.names:
        path = found.root / name
        is_called = plain_name(path).endswith(ARCHIVE_SUFFIXES)
        archive = members_of(path) if (is_called and _is_archive(path)) or found.kind == "archive" else None
        if archive is None:
            names.append(name)
            continue
        visible = [
            member for member in archive.members if not any(p[0] == "." or p == "__MACOSX" for p in member.split("/"))
        ]
        passed.update({"hidden": len(archive.members) - len(visible), "links": archive.others})
        names += [f"{name}/{member}" for member in visible]
    return replace(found, names=names, passed=+passed)


def _walk(root: Path, without: set[str]) -> tuple[list[str], Counter[str]]:
    """Return the sorted names of all regular files below a folder, and the counts of skipped files by reason.

    Hidden files are skipped. A link is followed if it leads to a file within the folder. A snapshot in the hub's cache
    consists of links to the blobs beside it; its Markdown files describe the data set, and are skipped.
    """
    files, passed = [], Counter[str]()
    real = Path(os.path.realpath(root))
    blobs = [parent.with_name("blobs") for parent in real.parents if parent.name == "snapshots"][:1]
    inside = [real, *(parent for parent in blobs if parent.is_dir())]

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename or root), error)

    for folder, below, names in os.walk(root, onerror=refuse):
        passed["hidden"] += sum(name.startswith(".") for name in (*below, *names))
        below[:] = [name for name in below if name not in without and not name.startswith(".")]
        links = [name for name in below if Path(folder, name).is_symlink()]
        for path in (Path(folder, name) for name in (*links, *names) if not name.startswith(".")):
            if path.is_symlink() and not (path.is_file() and _lies_in(path, inside)):
                passed["links"] += 1
            elif len(inside) == 2 and path.suffix == ".md":
                passed["cards"] += 1
            elif stat.S_ISREG(path.stat().st_mode):
                files.append(path.relative_to(root).as_posix())
            else:
                passed["devices"] += 1
    return sorted(files), +passed


def _lies_in(link: Path, folders: Sequence[Path]) -> bool:
    """Return whether a link's target is in one of these folders."""
    return any(map(Path(os.path.realpath(link)).is_relative_to, folders))
