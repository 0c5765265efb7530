"""Records the request of a prepare in its folder, so that the same request resumes it and no other is mixed in."""

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
    """Return the results of an earlier call's inspection of the files, if the same layout options were used."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = read_object(folder / _ASKED)
        request = state["asked"]
        options = {name: request[name] for name in request if name in (*Layout.FLAGS,)}
        if options == layout.flags and not request["limit-bytes"]:
            files = [_parse_known_file(fields) for fields in state["files"]]
            return {(file.name, file.bytes, file.modified_ns): file for file in files}
    return {}


def _parse_known_file(fields: dict[str, Any]) -> SourceFile:
    table = None if fields["table"] is None else Table(*fields["table"])
    return SourceFile(**{**fields, "root": Path(), "weights": tuple(fields["weights"]), "table": table})


def record_request(folder: Path, request: dict[str, Any], source: TextSource) -> None:
    """Record the request, or check that it equals the recorded request; UsageError if it differs.

    If no work was done yet, for example after a refusal, the new request replaces the recorded one.
    """
    try:
        before = read_object(folder / _ASKED)["asked"]
    except FileNotFoundError:
        if any(not path.name.startswith(f".{_ASKED}") for path in folder.iterdir()):
            raise UsageError(
                "data.out_in_use",
                f"{folder} contains other files, so it cannot be used for prepared data.",
                hint="Name an empty or new folder with --out.",
            ) from None
        files = [{**asdict(replace(file, root=Path())), "root": ""} for file in source.files]
        shard_files.write_json(folder / _ASKED, {"v": 1, "asked": request, "files": files})
        return
    except (OSError, ValueError, KeyError, TypeError):
        before = {}
    if before == request:
        return
    if not before or any(any(folder.glob(done)) for done in ("task-*.json", "*.bin", f"{DUPLICATES}/[!.]*")):
        words = {"source": "the source's files differ", "format": "another version of gpurun began it"}
        differing = [key for key in request if before.get(key) != request[key]]
        each = [words.get(key, f"--{key} was {before.get(key)}, now {request[key]}") for key in differing]
        raise UsageError(
            "prepare.other",
            f"{folder} contains an unfinished prepare of a different request: {'; '.join(each)}.",
            hint="Repeat that request to resume it, name another --out, or delete that folder to start over.",
        )
    remove_work(folder)
    record_request(folder, request, source)


def is_begun(folder: Path) -> bool:
    """Return whether an unfinished prepare can be resumed here."""
    return (folder / _ASKED).exists()


def lasting_digest(request: dict[str, Any], source: TextSource) -> str:
    """Return a digest of the request that ignores the files' times, so that it is the same on every machine."""
    files = [[file.name, file.form, file.bytes, file.table, file.held_out] for file in source.files]
    return hashlib.sha256(json.dumps([{**request, "source": ""}, files], sort_keys=True).encode()).hexdigest()


def remove_state(folder: Path) -> None:
    """Remove the files that a finished folder does not need."""
    remove_paths([*folder.glob("task-*.json"), *folder.glob(f"{UNFINISHED}*"), folder / DUPLICATES, folder / _ASKED])


def remove_work(folder: Path) -> None:
    """Remove all files that a prepare made in a folder, and keep all others."""
    remove_paths([*folder.glob("train_*.bin"), *folder.glob("val_*.bin"), folder / "vocab.json"])
    remove_state(folder)


def remove_paths(paths: Iterable[Path]) -> None:
    """Remove files and folders; missing ones are not an error."""
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; the folder is created if necessary, and removed at the end if it is empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = f"{folder} is not a folder, and cannot be created: {error.strerror}."
        hint = "Name another folder with --out that you can write to."
        raise UsageError("data.out_unusable", what, hint=hint) from None
    try:
        if not take_lock(descriptor):
            raise UsageError(
                "prepare.busy",
                f"Another prepare is writing to {folder}.",
                hint="Wait for it to end, or name another folder with --out.",
            )
        try:
            yield
        finally:  # A folder that another process has locked may still be empty, and is not removed.
            with contextlib.suppress(OSError):
                folder.rmdir()
    finally:
        os.close(descriptor)
