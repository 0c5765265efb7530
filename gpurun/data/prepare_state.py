"""How a prepare goes on where it was ended: what was asked for stands in its folder, nothing else is mixed in."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.filelock import take_lock
from gpurun.core.installed_files import shards as shard_files
from gpurun.core.untrusted import read_object
from gpurun.data.layout import Layout
from gpurun.data.look import Known
from gpurun.data.source_file import SourceFile, Table
from gpurun.data.sources import TextSource
from gpurun.data.tasks import UNFINISHED

_ASKED, DUPLICATES = "prepare.json", "dedupe"


def known_files(folder: Path, layout: Layout) -> Known:
    """What an earlier call found out about the files of its source, where they are read as they were."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = read_object(folder / _ASKED)
        asked = state["asked"]
        said = {name: asked[name] for name in asked if name in (*Layout.FLAGS,)}
        if said == layout.said and not asked["limit-bytes"]:
            files = [_known_file(fields) for fields in state["files"]]
            return {(file.name, file.bytes, file.modified_ns): file for file in files}
    return {}


def _known_file(fields: dict[str, Any]) -> SourceFile:
    table = None if fields["table"] is None else Table(*fields["table"])
    return SourceFile(**{**fields, "root": Path(), "weights": tuple(fields["weights"]), "table": table})


def write_down(folder: Path, asked: dict[str, Any], source: TextSource) -> None:
    """Write down what was asked for, or see that it is what was asked for before; UsageError if it is not.

    Where nothing was done yet, as after a refusal, there is nothing to go on with: what is asked for now is begun.
    """
    try:
        before = read_object(folder / _ASKED)["asked"]
    except FileNotFoundError:
        if any(not path.name.startswith(f".{_ASKED}") for path in folder.iterdir()):
            raise UsageError(
                "data.out_in_use",
                f"{folder} holds other files; prepared data would lie among them.",
                hint="Name an empty or a new folder with --out.",
            ) from None
        files = [{**asdict(replace(file, root=Path())), "root": ""} for file in source.files]
        shard_files.write_json(folder / _ASKED, {"v": 1, "asked": asked, "files": files})
        return
    except (OSError, ValueError, KeyError, TypeError):
        before = {}
    if before == asked:
        return
    if not before or any(any(folder.glob(done)) for done in ("task-*.json", "*.bin", f"{DUPLICATES}/[!.]*")):
        words = {"source": "the source's files differ", "format": "another version of gpurun began it"}
        differing = [key for key in asked if before.get(key) != asked[key]]
        each = [words.get(key, f"--{key} was {before.get(key)}, now {asked[key]}") for key in differing]
        raise UsageError(
            "prepare.other",
            f"{folder} holds an unfinished prepare of something else: {'; '.join(each)}.",
            hint="Ask for the same again to go on with it, name another --out, or delete that folder to begin again.",
        )
    remove_work(folder)
    write_down(folder, asked, source)


def is_begun(folder: Path) -> bool:
    """Whether a prepare that was not ended can go on here."""
    return (folder / _ASKED).exists()


def lasting_digest(asked: dict[str, Any], source: TextSource) -> str:
    """What was asked for, without the times of files: the same on every machine that has them."""
    files = [[file.name, file.form, file.bytes, file.table, file.held_out] for file in source.files]
    return hashlib.sha256(json.dumps([{**asked, "source": ""}, files], sort_keys=True).encode()).hexdigest()


def remove_state(folder: Path) -> None:
    """Remove what a finished folder has no use for."""
    remove_paths([*folder.glob("task-*.json"), *folder.glob(f"{UNFINISHED}*"), folder / DUPLICATES, folder / _ASKED])


def remove_work(folder: Path) -> None:
    """Remove all that a prepare has made in a folder, and nothing else that may lie there."""
    remove_paths([*folder.glob("train_*.bin"), *folder.glob("val_*.bin"), folder / "vocab.json"])
    remove_state(folder)


def remove_paths(paths: Iterable[Path]) -> None:
    """Remove files and folders; those that are not there are no error."""
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder for this process alone, made if it must be, and removed at the end if nothing is in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = f"{folder} is no folder, and cannot be made one: {error.strerror}."
        hint = "Name another folder with --out, where you may write."
        raise UsageError("data.out_unusable", what, hint=hint) from None
    try:
        if not take_lock(descriptor):
            raise UsageError(
                "prepare.busy",
                f"Another prepare is writing into {folder}.",
                hint="Wait for it to end, or name another folder with --out.",
            )
        try:
            yield
        finally:  # Never of a folder that another one holds, which may be empty still.
            with contextlib.suppress(OSError):
                folder.rmdir()
    finally:
        os.close(descriptor)
