"""The files that a source names: those beneath a folder, in an archive, in a data set of the hub; or one."""

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
from gpurun.data.shard_folder import demand_whole
from gpurun.data.source_names import HUB, STDLIB
from gpurun.data.streams import plain_name

_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__"}
"""Of the standard library, folders with other people's code, with tests (not installed everywhere) and with tables."""


@dataclass(frozen=True)
class FoundFiles:
    """What a source names: its kind ("stdlib", "file", "folder", "archive", "hub"), and its files below a root.

    `names` are in the order of reading; `passed` counts what is no file of it, by reason.
    """

    kind: str
    root: Path
    names: list[str]
    passed: Counter[str]


def find_files(source: str, say: Say) -> FoundFiles:
    """Find the files of a source; UsageError where there is none of that name, or it is no text."""
    if source.startswith(HUB):
        return FoundFiles("hub", *hub.download_files(source.removeprefix(HUB), say), Counter())
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        names, passed = _walk(root, _NOT_PROSE)
        return FoundFiles(STDLIB, root, [n for n in names if n.endswith(".py") and "_sysconfigdata" not in n], passed)
    path = Path(source).expanduser()
    if not path.exists():
        hint = f"Check the path, or use the text that is always there: {STDLIB}."
        raise UsageError("data.missing", f"There is no file or folder {source}.", hint=hint)
    demand_whole(path)
    if path.is_file():
        found = FoundFiles("file", path.parent, [path.name], Counter())
        return _with_members(replace(found, kind="archive")) if _is_archive(path) else found
    if not path.is_dir():
        what = f"{source} is neither a file nor a folder."
        raise UsageError("data.not_a_file", what, hint="Name a text file, or a folder of some.")
    if (path / "data.json").is_file():
        raise UsageError(
            "data.already_prepared",
            f"{source} holds shards that are prepared already (it has a data.json).",
            hint="Hand that folder over as it is, or name the folder of texts that it was made from.",
        )
    return _with_members(FoundFiles("folder", path, *_walk(path, set())))


def _is_archive(path: Path) -> bool:
    """Whether a file holds others that are to be read; not where it is a document of an office program, or a model."""
    try:
        found = members_of(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return found is not None and (found.kind == "tar" or kind_of_zip(path) == "zip archive")


def _with_members(found: FoundFiles) -> FoundFiles:
    """Put the files of each archive in its place, in their order."""
    names, passed = [], Counter(found.passed)
    for name in found.names:
        path = found.root / name
        is_called = plain_name(path).endswith(ARCHIVE_SUFFIXES)
        archive = members_of(path) if (is_called and _is_archive(path)) or found.kind == "archive" else None
        if archive is None:
            names.append(name)
            continue
        seen = [one for one in archive.members if not any(p[0] == "." or p == "__MACOSX" for p in one.split("/"))]
        passed.update({"hidden": len(archive.members) - len(seen), "links": archive.others})
        names += [f"{name}/{one}" for one in seen]
    return replace(found, names=names, passed=+passed)


def _walk(root: Path, without: set[str]) -> tuple[list[str], Counter[str]]:
    """Every regular file beneath a folder, by name; hidden ones are left out.

    A link is followed to a file within the folder. A snapshot in the hub's cache is of links into the blobs beside it;
    its Markdown is the cards of a data set, as little its text as where it is named by hf:.
    """
    files, passed = [], Counter[str]()
    real = Path(os.path.realpath(root))
    blobs = [one.with_name("blobs") for one in real.parents if one.name == "snapshots"][:1]
    inside = [real, *(one for one in blobs if one.is_dir())]

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
    """Whether what a link leads to lies in one of some folders."""
    return any(map(Path(os.path.realpath(link)).is_relative_to, folders))
