"""Decides from their names which files are for training, validation and test: `wiki.{train,valid,test}.raw`.

Names are considered only if they divide the files: at least one name contains train, and at least one does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from gpurun.core.errors import UsageError
from gpurun.data.streams import plain_name

_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "val"
)
_ROWS = (".jsonl", ".ndjson", ".parquet", ".csv", ".tsv")
_PROGRAMS = re.compile(
    r"\.(py|pyi|ipynb|sh|m?js|tsx?|jsx|[ch]|cc|[ch]pp|cu|go|rs|java|kt|rb|php|lua|jl|r|m|sql|md|rst|html|css|ya?ml|toml"
    r"|cfg|ini|lock)"
)
"""A file called train.py or test.js is a program, not part of a corpus."""
_CUT = re.compile(r"[^a-z0-9]+|(?<=[a-z])(?=[0-9])")


def named_splits(names: Sequence[str]) -> dict[str, str]:
    """Return "train", "val", "test" or "" (undecided) for each name; {} if the names do not divide the files.

    UsageError if the names contradict one another.
    """
    called = {name: _find_splits_in(name) for name in names}
    splits = {name: next(iter(words), "") for name, words in called.items()}
    kinds = {*splits.values()} - {""}
    if "train" not in kinds:
        rows = [name for name, split in splits.items() if split and _find_suffix(name) in _ROWS]
        same = {_find_suffix(name) for name in rows} & {
            _find_suffix(name) for name, split in splits.items() if not split
        }
        # Some files of rows are called test or val, and others are not: the others are for training.
        return {name: splits[name] if name in rows else "train" for name in names} if same else {}
    if kinds == {"train"}:
        return {}
    suffixes = {_find_suffix(name) for name, split in splits.items() if split}
    doubtful = [
        name for name, words in called.items() if len(words) > 1 or (not words and _find_suffix(name) in suffixes)
    ]
    if doubtful:
        others = " and ".join(sorted(kinds - {"train"}))
        what = f"Files are called train and {others}, but the purpose of {doubtful[0]} is unclear"
        raise UsageError(
            "data.split_in_doubt",
            f"{what} (and {len(doubtful) - 1:,} more)." if len(doubtful) > 1 else f"{what}.",
            hint="Use flags of gpurun data prepare: --exclude GLOB leaves files out, --val FILE or DIR holds them out, "
            "--val none uses all files and holds out a random part.",
        )
    return splits


def _find_splits_in(name: str) -> set[str]:
    """Return the splits that the parts of a file name mention; none for a program's name."""
    path = PurePosixPath(name)
    if _PROGRAMS.fullmatch(_find_suffix(name)):
        return set()
    parts = [*path.parts[:-1], plain_name(path)]
    return {_WORDS[word] for part in parts for word in _CUT.split(part.lower()) if word in _WORDS}


def _find_suffix(name: str) -> str:
    return PurePosixPath(plain_name(PurePosixPath(name))).suffix
