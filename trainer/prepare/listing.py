"""Which files a source has: the standard library's, one, or those of a folder."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.prepare.errors import Refusal, unreadable

__all__ = ["STDLIB", "files_of", "tally"]

STDLIB = "stdlib"
_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__"}
"""Of the standard library, folders with other people's code, with tests (not installed everywhere) and with tables."""


def files_of(source: str) -> tuple[str, Path, list[str], dict[str, int]]:
    """(kind, root, names of files below it, skipped) of a source, by name. Raises Refusal."""
    try:
        return _files_of(source)
    except OSError as error:
        raise unreadable(Path(error.filename or source), error) from None


def _files_of(source: str) -> tuple[str, Path, list[str], dict[str, int]]:
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files, skipped = _walk(
            root, lambda name: name.endswith(".py") and not name.startswith("_sysconfigdata"), _NOT_PROSE
        )
        return STDLIB, root, files, skipped
    path = Path(source).expanduser()
    if not path.exists():
        raise Refusal(
            "data.missing",
            f"There is no file or folder {source}.",
            hint=f"Check the path, or use the text that is always there: {STDLIB}.",
        )
    if path.is_file():
        return "file", path.parent, [path.name], {}
    if not path.is_dir():
        raise Refusal(
            "data.not_a_file",
            f"{source} is neither a file nor a folder.",
            hint="Name a text file, or a folder of some.",
        )
    if (path / "data.json").is_file():
        raise Refusal(
            "data.already_prepared",
            f"{source} holds shards that are prepared already (it has a data.json).",
            hint="Hand that folder over as it is, or name the folder of texts that it was made from.",
        )
    files, skipped = _walk(path, lambda name: not name.startswith("."), set())
    return "folder", path, files, skipped


def tally(skipped: Mapping[str, int]) -> str:
    """What was passed over, by reason: "2 binary, 1 hidden"; "" for nothing."""
    return ", ".join(f"{count} {reason}" for reason, count in skipped.items())


def _walk(root: Path, wanted: Callable[[str], bool], without: set[str]) -> tuple[list[str], dict[str, int]]:
    """Every wanted regular file beneath a folder, by name; hidden folders are left out, links are not followed."""
    files, skipped = [], {}

    def refuse(error: OSError) -> None:
        raise error

    for folder, below, names in os.walk(root, onerror=refuse):
        hidden = sum(name.startswith(".") for name in (*below, *names))
        if hidden:
            skipped["hidden"] = skipped.get("hidden", 0) + hidden
        below[:] = [name for name in below if name not in without and not name.startswith(".")]
        linked = (name for name in below if Path(folder, name).is_symlink())
        for name in [*filter(wanted, names), *linked]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                files.append(path.relative_to(root).as_posix())
            else:
                reason = "links" if stat.S_ISLNK(mode) else "devices"
                skipped[reason] = skipped.get(reason, 0) + 1
    return sorted(files), skipped
