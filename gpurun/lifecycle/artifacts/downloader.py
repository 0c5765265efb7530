"""Download files from a machine or a bucket, and decide how long to wait for each.

All downloads use this module. The caller sets the order. A file that cannot be downloaded now does not delay the
others.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from gpurun.core.clock import Clock
from gpurun.core.errors import CollectFailed, GpurunError, StoreFull, TrainingFailed
from gpurun.core.paths import RunFolder
from gpurun.core.trainer_events import CheckpointEvent, TrainerEvent
from gpurun.lifecycle.artifacts.inventory import EgressBudget, Inventory
from gpurun.remote.client import FarSide
from gpurun.remote.download import noted_bytes, room_in
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile, locate_file
from gpurun.remote.resumable_file import HeldElsewhere
from gpurun.remote.small_files import LEAST_FILES, SMALL_BYTES, TakeFile, group_files

# If another process has a file open but has added nothing to it for this long, that process is probably suspended (^Z).
STUCK_S = 60.0
# Seconds before a failed background download is retried, and the most seconds to wait for its thread to end.
AGAIN_S, JOIN_S = 60.0, 3.0
# If reading the list of files took longer than QUICK_S, wait REST times as long before it is read again.
QUICK_S, REST = 0.5, 10
LOOK_FILES = 256
"""Check the remaining time each time this many small files have arrived."""

T = TypeVar("T")

# Called with a file and how many of its bytes are on this computer; 0 if its download starts over.
Tell = Callable[[ManifestFile, int], object]


class FileSource(Protocol):
    """A source of files, such as a machine or a bucket. `fetch` is described at `gpurun.remote.download.fetch`."""

    def fetch(
        self, name: str, size_bytes: int, sha256: str, into: Path, *,
        on_progress: Callable[[int], None] | None = None, aside: bool = False,
    ) -> Path: ...  # fmt: skip

    def gather(self, files: Sequence[ManifestFile], take: TakeFile) -> list[ManifestFile]:
        """Download many small files and pass each to `take`. Return the files that no longer exist."""
        ...


class Waits:
    """Decides what happens when a file does not arrive. In this base class the first error ends the download."""

    for_room = False
    """Whether a file that the local disk has no room for is retried after all others have arrived."""

    def raise_if_stopped(self) -> None:
        """Raise an error that ends all downloads, for example after a stop request."""

    def require_time(self, file: ManifestFile, why: GpurunError | None) -> None:
        """Raise CollectFailed if no time is left for this file; also raise whatever `raise_if_stopped` raises.

        `why` is the last error that kept this file from arriving.
        """
        self.raise_if_stopped()

    def moved(self) -> None:
        """Note that bytes have arrived."""

    def wait(self, error: MachineLost | FarRefusal) -> None:
        """Pause before the next try, or raise: a FarRefusal ends this file only, any other error ends the download."""
        raise error

    def hold(self, held: Sequence[GpurunError]) -> None:
        """Pause, because all remaining files wait for the local disk or for another process that has them open."""
        raise held[0]

    def until_done(self, attempt: Callable[[], T]) -> T:
        """Repeat the attempt until it succeeds, and return its result. `wait` decides about each failure."""
        while True:
            self.raise_if_stopped()
            try:
                result = attempt()
            except (MachineLost, FarRefusal) as error:
                self.wait(error)
            else:
                self.moved()
                return result


class Downloader:
    """Downloads files: `here` has the verified files, and `missing` has an error for each file that was given up.

    `gone` is the error that made the source unusable. After that, nothing is downloaded; files that are already on this
    computer are still counted. `repeated_bytes` is how many bytes were downloaded a second time, because the connection
    broke or a digest was wrong.
    """

    def __init__(
        self, source: FileSource, inventory: Inventory, waits: Waits, clock: Clock, tell: Tell = lambda *_: None
    ) -> None:
        self._source, self._inventory, self._waits, self._clock, self._tell = source, inventory, waits, clock, tell
        self.here: dict[str, ManifestFile] = {}
        self.here_bytes = 0
        self.missing: dict[str, GpurunError] = {}
        self.gone: MachineLost | TrainingFailed | None = None
        self.repeated_bytes = 0
        self._why: dict[str, GpurunError] = {}
        self._held: dict[str, tuple[int, float]] = {}
        self._most: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def _count(self, file: ManifestFile) -> None:
        """Count a verified file. A file that was counted before adds no bytes."""
        self.here_bytes += file.bytes if file.name not in self.here else 0
        self.here[file.name] = file

    def _is_settled(self, file: ManifestFile) -> bool:
        """Return whether a file was verified or given up."""
        return file.name in self.here or file.name in self.missing

    def bring(self, files: Iterable[ManifestFile]) -> None:
        """Download the files in this order. A file that cannot be downloaded now is retried after the others."""
        deque(self.each(files), maxlen=0)

    def each(self, files: Iterable[ManifestFile]) -> Iterator[StoreFull]:
        """Download files as `bring` does, and yield the disk-full errors whenever all remaining files must wait."""
        waiting = list(files)
        while waiting and self.gone is None:
            try:
                waiting = self._try_each_once(waiting)
                held = [why for file in waiting if isinstance(why := self._why[file.name], StoreFull | HeldElsewhere)]
                yield from (why for why in held if isinstance(why, StoreFull))
                if held:
                    self._waits.hold(held)
            except (MachineLost, TrainingFailed) as gone:
                self.gone = gone
        if self.gone is not None:
            self.find(waiting)
            self.missing |= dict.fromkeys((file.name for file in waiting if not self._is_settled(file)), self.gone)

    def find(self, files: Iterable[ManifestFile]) -> None:
        """Count those of the files that are already on this computer, without downloading any."""
        for file in files:
            if not self._is_settled(file) and self._inventory.has(file):
                self._count(file)

    def _try_each_once(self, waiting: list[ManifestFile]) -> list[ManifestFile]:
        """Try each file once, in this order, and many small files in one stream. Return the files to retry."""
        left: list[ManifestFile] = []
        for is_small, run in groupby(waiting, key=lambda file: file.bytes < SMALL_BYTES):
            files = [file for file in run if not self._is_settled(file)]
            for some in group_files(files) if is_small and len(files) >= LEAST_FILES else ():
                self._download_together(some)
            left += [file for file in files if not self._finish(file)]
        return left

    def _download_together(self, files: Sequence[ManifestFile]) -> None:
        """Download small files together.

        A file that fails is downloaded separately afterwards, and then gets an error that names its own cause.
        """

        def take(file: ManifestFile, content: bytes) -> None:
            if len(self.here) % LOOK_FILES == 0:
                self._waits.require_time(file, None)
            if self._inventory.put(file, content):
                stored.append(file)
                self._waits.moved()
                self._count(file)
                self._tell(file, 0)

        stored: list[ManifestFile] = []
        self.find(files)
        if sum(file.bytes for file in files) > room_in(self._inventory.artifacts):
            return
        while left := [file for file in files if not self._is_settled(file)]:
            try:
                self._waits.require_time(left[0], None)
                for file in left:
                    self._inventory.require_planned(file)
                gone = FarRefusal("no_such_file", "it no longer exists as it was announced")
                self.missing |= dict.fromkeys((file.name for file in self._source.gather(left, take)), gone)
            except MachineLost as lost:
                self._waits.wait(lost)
                continue
            except (FarRefusal, CollectFailed, OSError) as error:
                logging.info("many files could not be fetched together: %s", error)
            break
        if stored:
            os.sync()  # Once for all files, before any caller relies on them.

    def _finish(self, file: ManifestFile) -> bool:
        """Download one file. Return False if it cannot be downloaded now and must be retried after the others."""
        while not self._is_settled(file):
            most = self._most.get(file.name)
            try:
                self._waits.require_time(file, self._why.get(file.name))
                self._inventory.require_planned(file)
                self._fetch(file)
            except (StoreFull, HeldElsewhere) as error:
                self._why[file.name] = error
                if isinstance(error, HeldElsewhere) or self._waits.for_room:
                    return False
                self.missing[file.name] = error
            except (MachineLost, FarRefusal) as error:
                self._why[file.name] = error
                try:
                    self._waits.wait(error)
                except FarRefusal as refusal:
                    self.missing[file.name] = refusal
                    continue
                if self._most.get(file.name) == most:  # Other files may still arrive.
                    return False
                continue
            except CollectFailed as error:  # A verified file counts, even if it arrived too late.
                if self._inventory.has(file):
                    self._count(file)
                else:
                    self.missing[file.name] = error
            else:
                self._waits.moved()
                self._count(file)
        return True

    def _fetch(self, file: ManifestFile) -> None:
        """Fetch one file, unless it is already on this computer.

        If another process has it open and is stuck, write to a separate partial file.
        """

        def on_progress(have_bytes: int) -> None:
            self._tell(file, have_bytes)
            self.repeated_bytes += max(0, self._last.get(file.name, 0) - have_bytes)
            self._last[file.name] = have_bytes
            if have_bytes > self._most.setdefault(file.name, have_bytes):
                self._most[file.name] = have_bytes
                self._waits.moved()
            self._waits.require_time(file, self._why.get(file.name))

        into = self._inventory.artifacts
        fetch = partial(self._source.fetch, file.name, file.bytes, file.sha256, into, on_progress=on_progress)
        try:
            fetch()
        except HeldElsewhere:
            if not self._is_stuck(file):
                raise
            fetch(aside=True)

    def _is_stuck(self, file: ManifestFile) -> bool:
        """Return whether the other process that has the file open has added nothing to it for STUCK_S."""
        noted, now_mono = noted_bytes(self._inventory.artifacts, file.sha256), self._clock.monotonic()
        before, since_mono = self._held.get(file.name, (-1, now_mono))
        if noted != before:
            self._held[file.name] = noted, now_mono
        return noted == before and now_mono - since_mono >= STUCK_S


class BackgroundDownload:
    """Downloads finished checkpoints from the machine `far` during training; if `far` is None, does nothing.

    If the machine is lost later, only the newest files are lost with it. This class has its own thread and connections,
    so the watch step never waits for a download. A failed download is retried after a minute or at the next checkpoint.
    The collect step downloads what is still missing.
    """

    def __init__(
        self, far: FarSide | None, folder: RunFolder, budget: EgressBudget, clock: Clock, is_attended: bool = False
    ) -> None:
        """Prepare downloads from the machine `far`; with None, nothing is downloaded.

        With `is_attended` (a dev box), also download other files than checkpoints, as far as the plan pays for that.
        """
        self._is_attended = is_attended
        self._far = far.lane() if far is not None else None
        self._inventory = Inventory(folder)
        self._budget = budget
        self._clock = clock
        self._new_files, self._over = threading.Event(), threading.Event()
        self._listing_s = 0.0
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> BackgroundDownload:
        if self._far is not None:
            if os.path.exists(self._inventory.folder.events):  # An earlier supervisor may have left a partial file.
                self._new_files.set()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._new_files.set()
        if self._far is not None:
            self._far.close()  # This wakes a fetch that has stalled.
            # A thread that hangs on a dead connection may outlast this; it could only write the same bytes.
            self._thread.join(JOIN_S)
            self._far.close()

    def look(self, events: Iterable[TrainerEvent]) -> None:
        """Start a download if the trainer's new events name finished files."""
        if any(isinstance(event, CheckpointEvent) or event.kind == "output" for event in events):
            self._new_files.set()

    def _work(self) -> None:
        assert self._far is not None
        wait_s: float | None = None
        while not self._over.is_set():
            self._new_files.wait(wait_s)
            if self._listing_s > QUICK_S:  # Do not repeat a slow list request at once.
                self._over.wait(REST * self._listing_s)
            self._new_files.clear()
            try:
                if not self._over.is_set():
                    self.bring(self._far)
                wait_s = None
            except _Stopped:
                break
            except GpurunError as error:
                wait_s = AGAIN_S
                logging.info("not downloaded yet: %s: %s", error.code, error.what)
            except OSError as error:
                wait_s = AGAIN_S
                logging.warning("not downloaded yet: this machine's disk: %s", error)
        self._far.close()  # The watch may have ended without waiting for this thread.

    def bring(self, far: FarSide) -> None:
        """Fetch finished files, those of the latest checkpoint first.

        Before and after, remove local files that newer files have replaced.
        """
        began_mono = self._clock.monotonic()
        manifest = far.manifest(MOST_ANNOUNCED_BYTES)
        self._inventory.remember(manifest)
        self._listing_s = self._clock.monotonic() - began_mono
        self._remove_replaced(manifest)
        files = self._select_affordable(manifest)
        before = self._inventory.memory
        self._inventory.note(files=tuple(sorted({*before.files, *(file.name for file in files)})))
        waits = _SpeedMeter(self._clock, self._over)
        downloads = Downloader(far, self._inventory, waits, self._clock, waits.tell)
        downloads.bring(files)
        self._inventory.note(bytes_per_s=waits.bytes_per_s or before.bytes_per_s)
        for why in downloads.missing.values():
            if not isinstance(why, FarRefusal):  # A refused file has since been replaced by a newer one.
                raise why
        waits.raise_if_stopped()  # The collect step has begun: do not remove files any more.
        self._note_newest(manifest, {*downloads.here})

    def _select_affordable(self, manifest: Manifest) -> list[ManifestFile]:
        """Return the files to download now, those of the latest checkpoint first.

        If egress is charged, return only the latest checkpoint, or on a dev box the smallest files, as far as the
        budget allows.
        """
        if self._budget.limit_bytes is not None:
            if self._is_attended:
                return [file for file in sorted(manifest.files, key=_by_size) if self._budget.take([file])]
            latest = [file for file in manifest.files if file.step == manifest.latest]
            return latest if self._budget.take(latest, by_step=manifest.latest or 0) else []
        return sorted(
            manifest.files, key=lambda file: (file.step != manifest.latest, file.bytes >= SMALL_BYTES, file.name)
        )

    def _note_newest(self, manifest: Manifest, here: set[str]) -> None:
        """Record the newest checkpoint if all its files are in `here`, and remove the older files that it replaces."""
        newest = [file for file in manifest.files if file.step == manifest.latest and file.kind != "sample"]
        if newest and {file.name for file in newest} <= here:
            self._inventory.note(step=manifest.latest, whole=tuple(newest))
            self._remove_replaced(manifest)

    def _remove_replaced(self, manifest: Manifest) -> None:
        """Remove downloaded files that the machine no longer lists, if a newer complete checkpoint was downloaded."""
        artifacts = self._inventory.artifacts
        with self._inventory.alone() as noted:
            needed = {file.name for file in (*manifest.files, *noted.whole)}
            if not noted.whole or not all(locate_file(artifacts, file.name).is_file() for file in noted.whole):
                return
            for name in {*noted.files} - needed - {*noted.kept}:
                locate_file(artifacts, name).unlink(missing_ok=True)
            self._inventory.write(noted, files=tuple(name for name in noted.files if name in needed))


def _by_size(file: ManifestFile) -> tuple[int, str]:
    return file.bytes, file.name


class _Stopped(GpurunError):
    """Raised when the watch is over; caught in this module."""

    def __init__(self) -> None:
        super().__init__("early.stopped", "Training has ended.", hint="Nothing to do.")


class _SpeedMeter(Waits):
    """Measures the download speed from the bytes that arrived and the time that they took."""

    def __init__(self, clock: Clock, over: threading.Event) -> None:
        self._clock, self._over, self._bytes, self._seconds = clock, over, 0, 0.0
        self._last: tuple[str, int, float] = "", 0, 0.0

    def raise_if_stopped(self) -> None:
        """Raise `_Stopped` once the watch step is over."""
        if self._over.is_set():
            raise _Stopped

    def tell(self, file: ManifestFile, have_bytes: int) -> None:
        """Note how many bytes of a file are on this computer."""
        (name, before, since_mono), now_mono = self._last, self._clock.monotonic()
        if name == file.name:
            self._bytes += max(0, have_bytes - before)
            self._seconds += now_mono - since_mono
        self._last = file.name, have_bytes, now_mono

    @property
    def bytes_per_s(self) -> float | None:
        """Return the speed so far; None if the fetches took too little time to measure it."""
        return self._bytes / self._seconds if self._seconds > 1.0 else None
