"""Decides which files of a source are for training and which are held out: by globs, --val, or the files' names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from gpurun.core.errors import UsageError
from gpurun.data.found_files import FoundFiles, find_files
from gpurun.data.layout import AS_TEXT, Layout
from gpurun.data.named_splits import named_splits
from gpurun.data.refusals import Say
from gpurun.data.source_file import ROWS, SourceFile
from gpurun.data.source_names import STDLIB

_FORM_WORDS = {
    "lines": "JSON Lines",
    "array": "a JSON array",
    "strings": "a JSON array of strings",
    "table": "a table",
    "parquet": "Parquet",
}


@dataclass(frozen=True)
class Chosen:
    """The names of the files for training and of the held-out files, which may be elsewhere.

    `division` is a sentence about which files are held out; "" if the texts decide what is held out.
    """

    train: list[str]
    val: list[str]
    val_root: Path
    passed: Counter[str]
    division: str = ""


def choose_files(found: FoundFiles, layout: Layout, say: Say) -> Chosen:
    """Return the chosen files; UsageError for a glob that matches no name, and for contradictory names."""
    passed = Counter(found.passed)
    names = _select_by_globs(found.names, layout, passed)
    is_divisible = found.kind not in ("file", STDLIB) and layout.val != AS_TEXT
    splits = named_splits(names) if is_divisible else {}
    if not layout.val or layout.val == AS_TEXT:
        apart, root = [name for name in names if splits.get(name) == "val"], found.root
    else:
        other = find_files(layout.val, say)
        apart, root = other.names, other.root
        passed.update(other.passed)
    held = {os.path.realpath(root / name) for name in apart}
    train = [name for name in names if splits.get(name, "train") == "train"]
    train = [name for name in train if os.path.realpath(found.root / name) not in held]
    tests = [name for name in names if splits.get(name) == "test"]
    left = Counter(splits[name] for name in names if splits and os.path.realpath(found.root / name) not in held)
    for split, reason in (("test", "test"), ("val", "validation"), ("", "beside train and test")):
        passed[reason] += left[split]
    why = "as --val says" if layout.val else f"because of {'its' if len(apart) == 1 else 'their'} name"
    division = f"held out {why}: {_format_first_and_count(apart)}" if apart else ""
    if tests:
        division += f"{'; ' if division else ''}test data is not used: {_format_first_and_count(tests)}"
    return Chosen(train, apart, root, +passed, division)


def _select_by_globs(names: Sequence[str], layout: Layout, passed: Counter[str]) -> list[str]:
    """Return the names that --include selects and --exclude does not; add the number of the others to `passed`."""
    kept = list(names)
    for flag, globs in (("include", layout.include), ("exclude", layout.exclude)):
        if not globs:
            continue
        for glob in globs:
            if not _matches_any(glob, names):
                what = f"--{flag} {glob!r} matches none of the {len(names):,} files."
                hint = f"Write globs as in .gitignore; a name here is {next(iter(names), 'a/b.txt')}."
                raise UsageError(f"usage.{flag}", what, hint=hint)
        fitting = set(GitIgnoreSpec.from_lines(globs).match_files(kept))
        chosen = [name for name in kept if (name in fitting) == (flag == "include")]
        passed["not included" if flag == "include" else "excluded"] += len(kept) - len(chosen)
        kept = chosen
    return kept


def _matches_any(glob: str, names: Sequence[str]) -> bool:
    try:
        return any(GitIgnoreSpec.from_lines([glob]).match_files(names))
    except ValueError:
        return False


def _format_first_and_count(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")


def demand_used(layout: Layout, files: Sequence[SourceFile]) -> None:
    """Raise UsageError for a flag that does not apply to any file, because the user expects it to have an effect."""
    forms = {file.form for file in files}
    tables, rows = "table" in forms, bool(forms & {*ROWS})
    unused = {
        "--text-column": bool(layout.column) and not rows,
        "--template": bool(layout.template) and not rows,
        "--delimiter": layout.delimiter not in ("", AS_TEXT) and not tables,
        "--no-header": not layout.has_head and not tables,
        "--per-line": layout.per_line and "per_line" not in forms,
    }
    for flag, is_unused in unused.items():
        if is_unused:
            expected = "rows with named columns" if flag in ("--text-column", "--template") else "a table"
            cure = "if it is a table: --delimiter CHAR"
            if flag == "--per-line":
                expected, cure = "a text", "if it is a text: --delimiter none"
            what = f"{flag} has no effect: no file of the source is read as {expected}."
            read = ", ".join(sorted({_FORM_WORDS.get(form, "text") for form in forms}))
            raise UsageError("usage.unused", what, hint=f"Leave it out; the source is {read} ({cure}).")
    if layout.val_fraction is not None and any(file.held_out for file in files):
        what = "--val-fraction has no effect: whole files are held out."
        raise UsageError("usage.unused", what, hint="Leave it out, or hold out a random part of all files: --val none.")
