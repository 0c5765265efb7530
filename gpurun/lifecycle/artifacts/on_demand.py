"""Download files when the user requests them: from the machine during training, or from the bucket it pushed to.

This takes no lock and writes no record. The supervisor continues, and its collect step recognises downloaded files by
their digests. If both need the same file, only one at a time has it open. `copy_out` copies files into the user's
folder; each copy has the verified digest or does not exist.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from gpurun.core.artifact_names import make_room_for_names
from gpurun.core.clock import Clock
from gpurun.core.errors import CollectFailed, GpurunError, StoreFull, UsageError
from gpurun.core.paths import RunFolder, fsync_file, fsync_folder, open_regular
from gpurun.core.retry import Retry
from gpurun.lifecycle.artifacts.downloader import Downloader, Tell, Waits
from gpurun.lifecycle.artifacts.inventory import EgressBudget, Inventory, due_files, spare_files
from gpurun.lifecycle.context import PASSING, RETRY_S
from gpurun.lifecycle.job_spec import read_list_key
from gpurun.remote.client import FarSide
from gpurun.remote.download import WantedFile, has_content
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile, locate_file
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.pushed_files import Pushed, fetch_pushed, gather_pushed, read_pushed
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_retry import retry_bucket_call
from gpurun.remote.small_files import TakeFile

Only = Literal["last", "best", "all"]
ONLY: tuple[Only, ...] = ("last", "best", "all")
UNREACHABLE = "collect.unreachable"
OVER_PLAN = "collect.over_plan"
CHECKPOINT = ("weights", "optimizer", "state")
TRIES = 3
# The most seconds that a user waits without progress on a connection or a bucket.
PATIENCE_S = 60.0
_BLOCK_BYTES = 1 << 20

# Selects files from a manifest.
Choose = Callable[[Manifest], Sequence[ManifestFile]]


class Brief(Waits):
    """Waits for a connection, or for another process that downloads the files, until PATIENCE_S without progress."""

    def __init__(self, clock: Clock) -> None:
        self._retry = Retry(clock, RETRY_S, limit_s=PATIENCE_S)

    def moved(self) -> None:
        """Note that bytes have arrived, which restarts PATIENCE_S."""
        self._retry.moved()

    def wait(self, error: MachineLost | FarRefusal) -> None:
        """Pause after a temporary failure. Raise a permanent refusal, and any error after PATIENCE_S."""
        if isinstance(error, FarRefusal) and error.reason not in PASSING:
            raise error
        self._retry.wait(error)

    def hold(self, held: Sequence[GpurunError]) -> None:
        """Pause while another process downloads the files, or while the disk is full."""
        self._retry.moved()  # If the other process is stuck, `Downloader` uses a separate partial file.
        self._retry.wait(held[0])


@dataclass(frozen=True)
class Brought:
    """The result of a download from a live run: `here` are the requested files; `left` are only on the machine."""

    manifest: Manifest
    here: tuple[ManifestFile, ...]
    left: tuple[ManifestFile, ...]


@dataclass(frozen=True)
class Salvaged:
    """The files that a machine pushed: those on this computer, and an error for each missing one.

    `left_out` names the files that the machine did not push. `seq` counts its pushes.
    """

    manifest: Manifest
    here: tuple[ManifestFile, ...]
    missing: dict[str, GpurunError]
    left_out: tuple[str, ...]
    seq: int


def bring_now(
    far: FarSide, folder: RunFolder, only: Only, clock: Clock, tell: Tell, budget: EgressBudget
) -> Brought:  # fmt: skip
    """Download the finished files that `only` selects, and verify them. `tell` is called with each file's progress.

    Raise UsageError if no selected file is finished yet, or if the plan does not pay for their egress. Raise
    CollectFailed if nothing arrives for PATIENCE_S, or if a file does not arrive as announced or cannot be stored.
    """
    inventory, waits = Inventory(folder), _Selected(clock)
    with far.many_lanes():
        for tries_left in reversed(range(TRIES)):
            try:
                manifest = waits.until_done(lambda: far.manifest(MOST_ANNOUNCED_BYTES))
                inventory.remember(manifest)
                files = _select_paid(manifest, only, inventory, budget)
                downloads = Downloader(far, inventory, waits, clock, tell)
                downloads.bring(files)
                break
            except _Replaced:
                if not tries_left:
                    raise
            except MachineLost as lost:
                raise _make_unreachable_error(lost) from lost
            except OSError as error:
                what = f"{folder.path} cannot be written: {error.strerror}."
                hint = "Fix that, or free some disk space, then run the command again. The run continues."
                raise CollectFailed("collect.cannot_store", what, hint=hint) from error
    for why in downloads.missing.values():
        raise _make_unreachable_error(why) if isinstance(why, MachineLost) else why
    chosen_names = {file.name for file in files}
    left = [file for file in manifest.files if file.name not in chosen_names and not inventory.has(file)]
    return Brought(manifest, tuple(files), tuple(left))


class _Replaced(CollectFailed):
    """Raised when a newer checkpoint has replaced a file on the list."""


class _Selected(Brief):
    """Ends the download when a listed file no longer exists, so that the caller reads a new list."""

    def wait(self, error: MachineLost | FarRefusal) -> None:
        """Pause like `Brief`, but raise `_Replaced` for a permanent refusal."""
        try:
            super().wait(error)
        except FarRefusal as refusal:
            hint = "Run the command again. What was downloaded before is kept, and the run continues."
            raise _Replaced(refusal.code, refusal.what, hint=hint) from refusal


def _select_paid(manifest: Manifest, only: Only, inventory: Inventory, budget: EgressBudget) -> list[ManifestFile]:
    """Return the selected files; note them as kept and count their egress."""
    files, run = select_files(manifest, only, inventory.folder.name), inventory.folder.name
    if not budget.take(files):
        selected_bytes = sum(file.bytes for file in files)
        raise UsageError(
            OVER_PLAN,
            f"Each byte that leaves this machine is charged. The plan of {run} pays for {budget.limit_bytes:,} before "
            f"training ends: {budget.spent_bytes:,} have left it, and these files have {selected_bytes:,}.",
            hint=f"The latest and the best checkpoint are fetched at its end. gpurun stop {run} saves and ends it.",
        )
    inventory.keep(file.name for file in files)
    return files


def select_files(manifest: Manifest, only: Only, run: str, *, is_over: bool = False) -> list[ManifestFile]:
    """Return the selected files, newest first and weights first. Raise UsageError if no such file is finished."""
    if only == "all":
        found = list(manifest.files)
    else:
        step = manifest.latest if only == "last" else manifest.best.step if manifest.best else None
        found = [file for file in manifest.files if file.step == step and file.kind in CHECKPOINT]
    if not found:
        nothing = {"last": "finished no checkpoint", "best": "evaluated no checkpoint that it keeps"}
        what = f"{run} has {nothing.get(only, 'finished no file')}{'' if is_over else ' yet'}."
        later = f"Try again later; gpurun attach {run} shows its progress."
        hint = f"What was downloaded, and why: gpurun receipt {run}" if is_over else later
        raise UsageError("checkpoint.none", what, hint=hint)
    return sorted(found, key=lambda file: (-file.step, file.kind != "weights", file.name))


def _make_unreachable_error(lost: MachineLost) -> CollectFailed:
    hint = "What was downloaded before is kept. `gpurun ps` shows the state of the run."
    return CollectFailed(UNREACHABLE, f"The machine cannot be reached: {lost.what}", hint=hint)


def download_pushed_files(
    folder: RunFolder,
    url: str,
    place: str,
    clock: Clock,
    *,
    choose: Choose = lambda manifest: [*due_files(manifest), *spare_files(manifest)],
    tell: Tell = lambda *_: None,
) -> Salvaged:
    """Download files that a machine pushed to `place` in a bucket (`RunState.pushed`), and verify their digests.

    `choose` selects the files; the default is all of them, most valuable first. Only files in a list signed with the
    run's key are accepted. If nothing was pushed, the manifest is empty. Raise SetupError, BucketLost or CollectFailed
    if the list cannot be read.
    """
    bucket = Bucket(parse_address(url), clock)
    key = read_list_key(folder.push_key)
    retry_bucket_call(clock, PATIENCE_S, bucket.look)
    read = partial(read_pushed, bucket, place, run=folder.name, key=key, most_bytes=MOST_ANNOUNCED_BYTES)
    pushed = retry_bucket_call(clock, PATIENCE_S, read)
    if pushed is None:
        return Salvaged(Manifest(), (), {}, (), 0)
    inventory = Inventory(folder)
    inventory.expect(pushed.manifest)
    downloads = Downloader(_BucketSource(bucket, place, pushed), inventory, Brief(clock), clock, tell)
    downloads.bring(choose(pushed.manifest))
    return Salvaged(pushed.manifest, (*downloads.here.values(),), downloads.missing, pushed.left_out, pushed.seq)


class _BucketSource:
    """A source for the files that a machine pushed to a bucket."""

    def __init__(self, bucket: Bucket, place: str, pushed: Pushed) -> None:
        self._bucket, self._place, self._pushed = bucket, place, pushed

    def fetch(
        self, name: str, size_bytes: int, sha256: str, into: Path, *,
        on_progress: Callable[[int], None] | None = None, aside: bool = False,
    ) -> Path:  # fmt: skip
        file = WantedFile(name, size_bytes, sha256, on_progress, aside)
        return fetch_pushed(self._bucket, self._place, self._pushed, file, into)

    def gather(self, files: Sequence[ManifestFile], take: TakeFile) -> list[ManifestFile]:
        """Download many small files and pass each to `take`; return []."""
        gather_pushed(self._bucket, self._place, self._pushed, files, take)
        return []


def copy_out(artifacts: Path, files: Sequence[ManifestFile], folder: Path) -> None:
    """Copy files into a folder under their own names. A correct copy that exists already is not written again.

    Raise UsageError, before anything is copied, if a different file has one of the names. Raise CollectFailed if a copy
    cannot be written or differs from the verified file; such a copy is removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        make_room_for_names(folder, (file.name for file in files))
        places = {locate_file(folder, file.name): file for file in files}
        missing = {place: file for place, file in places.items() if not _is_there(place, file)}
        _check_room(folder, sum(file.bytes for file in missing.values()))
        for place, file in missing.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            _copy_verified(locate_file(artifacts, file.name), place, file, folder)
    except OSError as error:
        what = f"{error.filename or folder} cannot be copied to: {error.strerror}."
        hint = f"Fix that, or name another folder with --to. The downloaded files are in {artifacts}."
        raise CollectFailed("collect.cannot_store", what, hint=hint) from error


def _is_there(place: Path, file: ManifestFile) -> bool:
    """Return whether the copy already exists. Raise UsageError if a different file has its name."""
    if has_content(place, WantedFile(file.name, file.bytes, file.sha256)):
        return True
    if os.path.lexists(place):
        hint = "Name another folder with --to, or move that file away."
        raise UsageError("collect.in_the_way", f"{place} exists already and is a different file.", hint=hint)
    return False


def _check_room(folder: Path, needed_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        what = f"The copies need {needed_bytes:,} bytes; the disk of {folder} has {free_bytes:,} free."
        raise StoreFull("collect.disk_full", what, hint="Free some space, or name another folder with --to.")


def _copy_verified(source: Path, place: Path, file: ManifestFile, folder: Path) -> None:
    # Not beside the copy: its name may be too long for a suffix.
    part, digest = folder / f".gpurun.{os.getpid()}.{threading.get_ident()}.part", hashlib.sha256()
    try:
        with open_regular(source) as content, part.open("wb") as out:
            while block := content.read(_BLOCK_BYTES):
                digest.update(block)
                out.write(block)
            out.flush()
            fsync_file(out.fileno())
        if digest.hexdigest() != file.sha256:
            raise _make_altered_error(source)
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)
    fsync_folder(place.parent)


def _make_altered_error(source: Path) -> GpurunError:
    return CollectFailed(
        "collect.altered",
        f"{source} has changed since it was downloaded: its digest is different.",
        hint="gpurun audit shows what else has changed.",
    )
