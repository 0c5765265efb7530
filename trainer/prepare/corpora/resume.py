"""How a prepare goes on where it was ended: what was asked for stands in its folder, nothing else is mixed in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.prepare.corpora.division import digest_of_files
from trainer.prepare.corpora.task import UNFINISHED
from trainer.prepare.errors import Refusal
from trainer.prepare.shards import write_json
from trainer.prepare.sources.opening import Known, Source
from trainer.prepare.tokenizers import Tokenizer, sha256_of_tokens

__all__ = [
    "DUPLICATES",
    "LOGS",
    "UNPACKING",
    "begin",
    "identity_of",
    "is_begun",
    "is_looked_at",
    "keep_looked_at",
    "known_files",
    "lasting_digest",
    "remove",
    "remove_state",
    "remove_unfinished",
    "remove_work",
    "what_is_asked",
]

FORMAT = 5
"""Counts up whenever the same source would be prepared into other bytes, so that no older work is gone on with."""
_ASKED = "prepare.json"
_LOOKED = "looked.json"
LOGS = "logs"
"""The folder in which datatrove writes what it does."""
UNPACKING = ".unpacking"
"""The folder in which the dictionaries of large pages are kept."""
DUPLICATES = "dedupe"
"""The folder in which it is written which documents go."""


def what_is_asked(
    source: Source, tokenizer: str, val_fraction: float, shard_tokens: int, column: str, **more: int | str
) -> dict[str, Any]:
    """Everything that the bytes depend on, by the names under which a difference is told."""
    return {
        "format": FORMAT,
        "source": digest_of_files(source.files),
        "tokenizer": tokenizer,
        "val-fraction": val_fraction,
        "shard-tokens": shard_tokens,
        "text-column": column,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


def identity_of(asked: dict[str, Any], tokenizer: Tokenizer) -> str:
    """Names everything that the bytes of a task's shards depend on, besides its texts."""
    named = {**asked, "vocabulary": sha256_of_tokens(tokenizer.tokens)}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def known_files(folder: Path, column: str) -> Known:
    """What an earlier call found out about the files of its source; of rows, about this column."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads((folder / _ASKED).read_bytes())
        found = state["files"] if state["asked"]["text-column"] == column else []
        return {
            (name, size, modified_ns): (parted, tuple(weights)) for name, size, modified_ns, weights, parted in found
        }
    return {}


def begin(folder: Path, asked: dict[str, Any], source: Source) -> None:
    """Write down what was asked for, or see that it is what was asked for before; raise Refusal if it is not.

    Where nothing was done yet, as after a refusal, there is nothing to go on with: what is asked for now is begun.
    """
    try:
        before = json.loads((folder / _ASKED).read_bytes())["asked"]
    except FileNotFoundError:
        if any(path.name != f".{_ASKED}" for path in folder.iterdir()):
            raise Refusal(
                "data.out_in_use",
                f"{folder} holds other files; prepared data would lie among them.",
                hint="Name an empty or a new folder with --out.",
            ) from None
        files = [
            [file.name, file.bytes, file.modified_ns, file.weights, file.form == "separated"] for file in source.files
        ]
        write_json(folder / f".{_ASKED}", {"v": 1, "asked": asked, "files": files})
        os.rename(folder / f".{_ASKED}", folder / _ASKED)
        return
    except (OSError, ValueError, KeyError, TypeError):
        before = {}
    if before == asked:
        return
    if not before or any(any(folder.glob(done)) for done in ("task-*.json", "*.bin", f"{DUPLICATES}/[!.]*")):
        raise _other(folder, before, asked)
    remove_work(folder)
    begin(folder, asked, source)


def _other(folder: Path, before: dict[str, Any], asked: dict[str, Any]) -> Refusal:
    words = {"source": "the source's files differ", "format": "another version of gpurun began it"}
    told = [
        words.get(key, f"--{key} was {before.get(key)}, now {asked[key]}")
        for key in asked
        if before.get(key) != asked[key]
    ]
    return Refusal(
        "prepare.other",
        f"{folder} holds an unfinished prepare of something else: {'; '.join(told)}.",
        hint="Ask for the same again to go on with it, name another --out, or delete that folder to begin again.",
    )


def lasting_digest(asked: dict[str, Any], source: Source) -> str:
    """What was asked for, without the times of files: the same on every machine that has them."""
    files = [[file.name, file.form, file.bytes] for file in source.files]
    return hashlib.sha256(json.dumps([{**asked, "source": ""}, files], sort_keys=True).encode()).hexdigest()


def remove_state(folder: Path) -> None:
    """Remove what a finished folder has no use for."""
    remove(
        [
            *folder.glob("task-*.json"),
            *folder.glob(f"{UNFINISHED}*"),
            folder / DUPLICATES,
            folder / LOGS,
            folder / UNPACKING,
            folder / _LOOKED,
            folder / _ASKED,
        ]
    )


def is_looked_at(folder: Path, asked: dict[str, Any]) -> bool:
    """Whether the rows of this source were all read once, and nothing was wrong with this column of them."""
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((folder / _LOOKED).read_bytes()) == _looked(asked))
    return False


def keep_looked_at(folder: Path, asked: dict[str, Any]) -> None:
    """Write down that they were; half of it says nothing, and they are read again."""
    write_json(folder / _LOOKED, _looked(asked))


def _looked(asked: dict[str, Any]) -> dict[str, Any]:
    return {"v": 1, **{key: asked[key] for key in ("source", "text-column")}}


def remove_unfinished(folder: Path) -> None:
    """Remove what is half done, before work too: what a killed one left takes the room that going on needs."""
    remove([*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{DUPLICATES}/.*")])


def is_begun(folder: Path) -> bool:
    """Whether what `begin` wrote is still there."""
    return (folder / _ASKED).exists()


def remove_work(folder: Path) -> None:
    """Remove all that a prepare has made in a folder, and nothing else that may lie there."""
    remove([*folder.glob("train_*.bin"), *folder.glob("val_*.bin"), folder / "vocab.json"])
    remove_state(folder)


def remove(paths: Iterable[Path]) -> None:
    """Remove files and folders; those that are not there are no error."""
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
