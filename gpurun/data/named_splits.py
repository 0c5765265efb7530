"""Which files are for training, validation and test, according to their names: `wiki.{train,valid,test}.raw`.

Names count only if they form a split: one file is called train and another is not.
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

    UsageError if they contradict one another.
    """
    called = {name: _words_of(name) for name in names}
    splits = {name: next(iter(words), "") for name, words in called.items()}
    kinds = {*splits.values()} - {""}
    if "train" not in kinds:
        rows = [name for name, split in splits.items() if split and _suffix(name) in _ROWS]
        same = {_suffix(name) for name in rows} & {_suffix(name) for name, split in splits.items() if not split}
        # Rows beside other files without such names: the others are not trained on.
        return {name: splits[name] if name in rows else "train" for name in names} if same else {}
    if kinds == {"train"}:
        return {}
    suffixes = {_suffix(name) for name, split in splits.items() if split}
    doubtful = [name for name, words in called.items() if len(words) > 1 or (not words and _suffix(name) in suffixes)]
    if doubtful:
        what = f"Files are called train and {' and '.join(sorted(kinds - {'train'}))}, and {doubtful[0]} may be either"
        raise UsageError(
            "data.split_in_doubt",
            f"{what} (and {len(doubtful) - 1:,} more)." if len(doubtful) > 1 else f"{what}.",
            hint="Use flags of gpurun data prepare: --exclude GLOB leaves it out, --val FILE or DIR is held out, "
            "--val none uses all files and holds out a random part.",
        )
    return splits


def _words_of(name: str) -> set[str]:
    """Return the splits that the parts of a name mention, except for programs."""
    path = PurePosixPath(name)
    if _PROGRAMS.fullmatch(_suffix(name)):
        return set()
    parts = [*path.parts[:-1], plain_name(path)]
    return {_WORDS[word] for part in parts for word in _CUT.split(part.lower()) if word in _WORDS}


def _suffix(name: str) -> str:
    return PurePosixPath(plain_name(PurePosixPath(name))).suffix
