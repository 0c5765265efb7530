"""Downloads the Parquet or JSON Lines files of a Hugging Face data set, once, into the hub's own cache.

The name is `OWNER/NAME`; `/FOLDER` or a pattern (`/shard_00*`) selects some of its files, and `@REVISION` a revision
other than the newest. huggingface_hub resumes and verifies a download. HF_HOME is the folder of the cache; HF_TOKEN
gives access to gated data sets.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

from gpurun.core.errors import GpurunError, SetupError, UsageError
from gpurun.core.installed_files import install_line

__all__ = ["download_files"]

_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")


def download_files(name: str, say: Callable[[str], None]) -> tuple[Path, list[str]]:
    """Download a data set's files if necessary, and return (root, names below it); GpurunError if that fails."""
    place, _, revision = name.partition("@")
    owner, _, rest = place.partition("/")
    dataset, _, folder = rest.partition("/")
    if not owner or not dataset:
        raise _bad_name_error(name)
    root = _download(_huggingface_hub(), f"{owner}/{dataset}", folder.rstrip("/"), revision or None, say)
    # The cache may also contain files of another part of the same data set.
    found = root.glob(folder) if _is_pattern(folder) else (root / folder).rglob("*")
    paths = sorted(path for path in found if path.name.endswith(_SUFFIXES))
    if not paths:
        raise UsageError(
            "data.empty",
            f"hf:{name} has no Parquet or JSON Lines files{f' in {folder}' if folder else ''}.",
            hint="Check the data set's files on the hub, and name one of its folders.",
        )
    return root, [path.relative_to(root).as_posix() for path in paths]


def _is_pattern(folder: str) -> bool:
    return any(sign in folder for sign in "*?[")


def _download(hub: ModuleType, dataset: str, folder: str, revision: str | None, say: Callable[[str], None]) -> Path:
    """Download the current version, and return its folder; if the hub is unreachable, an earlier download's folder."""
    patterns = [f"{folder}/**/*{suffix}" if folder else f"**/*{suffix}" for suffix in _SUFFIXES]
    patterns += [f"{folder}/*{suffix}" if folder else f"*{suffix}" for suffix in _SUFFIXES]
    patterns = [folder] if _is_pattern(folder) else patterns
    options: dict[str, Any] = {"repo_type": "dataset", "revision": revision, "allow_patterns": patterns}
    say(f"asking the hub for {dataset}")
    # The last are httpx's errors, for example for a broken connection; this version may have its own copy of httpx.
    broken = (hub.errors.LocalEntryNotFoundError, OSError, *hub.errors.HfHubHTTPError.__bases__)
    try:
        missing = [file for file in hub.snapshot_download(dataset, **options, dry_run=True) if file.will_download]
    except hub.errors.HFValidationError as error:
        raise _bad_name_error(dataset) from error
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        raise UsageError(
            "data.hub_missing",
            f"The hub has no data set {dataset}" + (f" at {revision}." if revision else ", or not for you."),
            hint="Check its name on huggingface.co; a gated data set needs HF_TOKEN.",
        ) from error
    except broken as error:
        return _find_earlier_download(hub, dataset, options, error, say)
    cache = Path(hub.constants.HF_HUB_CACHE)
    _check_room(sum(file.file_size or 0 for file in missing), len(missing), cache, say)
    try:
        return Path(hub.snapshot_download(dataset, **options))
    except broken as error:
        # The cache now holds an incomplete part that must not be used.
        raise _interrupted_download_error(dataset, cache, error) from None


def _find_earlier_download(
    hub: ModuleType, dataset: str, options: dict[str, Any], error: Exception, say: Callable[[str], None]
) -> Path:
    """Return the folder of an earlier download, for use when the hub cannot be reached; UsageError if there is none."""
    try:
        root = Path(hub.snapshot_download(dataset, **options, local_files_only=True))
    except (hub.errors.LocalEntryNotFoundError, OSError):
        what = " ".join(str(error).split())[:120]
        raise UsageError(
            "data.hub_unreachable",
            f"{dataset} is not in the hub's cache, and the hub cannot be reached: {what} …",
            hint="Prepare it on a computer with a network, or copy its Parquet files here and name their folder.",
        ) from None
    say(f"the hub cannot be reached; using the earlier download of {dataset}, which may be incomplete")
    return root


def _bad_name_error(name: str) -> UsageError:
    return UsageError(
        "usage.hub_name",
        f"hf:{name} does not name a data set of the hub.",
        hint="Write hf:OWNER/NAME, for example hf:HuggingFaceFW/fineweb-edu/sample/10BT.",
    )


def _interrupted_download_error(dataset: str, cache: Path, error: Exception) -> GpurunError:
    what = " ".join(str(error).split())[:120]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free disk space, or name a cache on another disk: HF_HOME=DIR."
        return SetupError("disk.full", f"The disk of {cache} is full; {dataset} is incomplete.", hint=hint)
    hint = "The downloaded files are kept: the same command resumes the download."
    return UsageError("data.hub_unreachable", f"The download of {dataset} was interrupted: {what} …", hint=hint)


def _check_room(need: int, count: int, cache: Path, say: Callable[[str], None]) -> None:
    """Report what will be downloaded; SetupError if the cache's disk has too little space."""
    if not count:
        return
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    say(f"downloading {count} files, {need / 1e9:,.2f} GB, into {cache}")
    if need > free:
        raise SetupError(
            "disk.too_small",
            f"Downloading {need / 1e9:,.2f} GB into {cache} needs {ceil((need - free) / 1e6):,} MB more space.",
            hint="Free disk space, or name a cache on another disk: HF_HOME=DIR.",
        )


def _huggingface_hub() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise UsageError(
            "data.no_hub",
            "Downloading data sets of the hub needs huggingface_hub, which is not installed here.",
            hint=install_line("data"),
        ) from None
    return huggingface_hub
