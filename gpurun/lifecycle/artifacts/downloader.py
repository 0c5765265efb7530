"""The one way to download files, from a machine or from a bucket, and how long it waits for each.

The caller sets the order; a file that is held up does not delay the others.
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

# A process that holds a file open and has added nothing to it for this long was stopped, for example by ^Z.
STUCK_S = 60.0
# How soon the watch retries what it could not download, and how long it waits for a download that it ends.
AGAIN_S, JOIN_S = 60.0, 3.0
# After a list that took longer than QUICK_S, wait REST times as long before the next.
QUICK_S, REST = 0.5, 10
LOOK_FILES = 256
"""After this many small files, check whether there is time for more."""

T = TypeVar("T")

# Called with each file under way and how many of its bytes are here; 0 if it starts over.
Tell = Callable[[ManifestFile, int], object]


class FileSource(Protocol):
    """Where files come from; see `gpurun.remote.download.fetch`."""

    def fetch(
        self, name: str, size_bytes: int, sha256: str, into: Path, *,
        on_progress: Callable[[int], None] | None = None, aside: bool = False,
    ) -> Path: ...  # fmt: skip

    def gather(self, files: Sequence[ManifestFile], take: TakeFile) -> list[ManifestFile]:
        """Pass many small files to `take`; return those that no longer exist."""
        ...


class Waits:
    """What to do about a file that does not come; here nothing: the first error ends the download."""

    for_room = False
    """Whether to wait for a file that this disk has no room for, once the others are here."""

    def raise_if_stopped(self) -> None:
        """Raise what ends everything, such as a request to stop."""

    def demand_time(self, file: ManifestFile, why: GpurunError | None) -> None:
        """As `raise_if_stopped`; also CollectFailed if no time is left for this file, which was held up by `why`."""
        self.raise_if_stopped()

    def moved(self) -> None:
        """Note that bytes have come."""

    def wait(self, error: MachineLost | FarRefusal) -> None:
        """Pause before the next try, or raise: a FarRefusal concerns one file, anything else all of them."""
        raise error

    def hold(self, held: Sequence[GpurunError]) -> None:
        """Pause while this disk, or another process that fetches them, holds up all files that are left."""
        raise held[0]

    def until_done(self, attempt: Callable[[], T]) -> T:
        """Return the result of the attempt once it succeeds, retrying as `wait` decides."""
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
    """Downloads files: `here` are the verified ones; `missing` has the reason for each of the others.

    `gone` is set once the source is given up; from then on only files that are already here are found. `again_bytes`
    came a second time, after a line was cut or a digest was wrong.
    """

    def __init__(
        self, source: FileSource, inventory: Inventory, waits: Waits, clock: Clock, tell: Tell = lambda *_: None
    ) -> None:
        self._source, self._inventory, self._waits, self._clock, self._tell = source, inventory, waits, clock, tell
        self.here: dict[str, ManifestFile] = {}
        self.here_bytes = 0
        self.missing: dict[str, GpurunError] = {}
        self.gone: MachineLost | TrainingFailed | None = None
        self.again_bytes = 0
        self._why: dict[str, GpurunError] = {}
        self._held: dict[str, tuple[int, float]] = {}
        self._most: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def _count(self, file: ManifestFile) -> None:
        """Count a verified file."""
        self.here_bytes += file.bytes if file.name not in self.here else 0
        self.here[file.name] = file

    def _is_settled(self, file: ManifestFile) -> bool:
        """Return whether a file is here or given up."""
        return file.name in self.here or file.name in self.missing

    def bring(self, files: Iterable[ManifestFile]) -> None:
        """Download files in their order; one that is held up comes after the others."""
        deque(self.each(files), maxlen=0)

    def each(self, files: Iterable[ManifestFile]) -> Iterator[StoreFull]:
        """As `bring`; yield the disk-full errors whenever all files that are left are held up."""
        waiting = list(files)
        while waiting and self.gone is None:
            try:
                waiting = self._left_of(waiting)
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
        """Count the files that are here already, of those that are no longer fetched or not worth a paid minute."""
        for file in files:
            if not self._is_settled(file) and self._inventory.has(file):
                self._count(file)

    def _left_of(self, waiting: list[ManifestFile]) -> list[ManifestFile]:
        """Download files in their order, many small ones in one stream; return those that are not done after that."""
        left: list[ManifestFile] = []
        for is_small, run in groupby(waiting, key=lambda file: file.bytes < SMALL_BYTES):
            files = [file for file in run if not self._is_settled(file)]
            for some in group_files(files) if is_small and len(files) >= LEAST_FILES else ():
                self._gather(some)
            left += [file for file in files if not self._is_done(file)]
        return left

    def _gather(self, files: Sequence[ManifestFile]) -> None:
        """Download small files together; one that fails is fetched alone afterwards, with its own reason."""

        def take(file: ManifestFile, content: bytes) -> None:
            if len(self.here) % LOOK_FILES == 0:
                self._waits.demand_time(file, None)
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
                self._waits.demand_time(left[0], None)
                for file in left:
                    self._inventory.demand_planned(file)
                gone = FarRefusal("no_such_file", "it no longer exists as it was announced")
                self.missing |= dict.fromkeys((file.name for file in self._source.gather(left, take)), gone)
            except MachineLost as lost:
                self._waits.wait(lost)
                continue
            except (FarRefusal, CollectFailed, OSError) as error:
                logging.info("many files could not be fetched together: %s", error)
            break
        if stored:
            os.sync()  # Once for all of them, before anything relies on them.

    def _is_done(self, file: ManifestFile) -> bool:
        """Return whether a file is here or given up; otherwise the others come first, and it is retried after them."""
        while not self._is_settled(file):
            most = self._most.get(file.name)
            try:
                self._waits.demand_time(file, self._why.get(file.name))
                self._inventory.demand_planned(file)
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
                if self._most.get(file.name) == most:  # It may be only this file that does not come.
                    return False
                continue
            except CollectFailed as error:  # Even if it is late, a file here with the right digest counts.
                if self._inventory.has(file):
                    self._count(file)
                else:
                    self.missing[file.name] = error
            else:
                self._waits.moved()
                self._count(file)
        return True

    def _fetch(self, file: ManifestFile) -> None:
        """Fetch one file, unless it is here; if another process that holds it is stuck, fetch it aside."""

        def on_progress(have_bytes: int) -> None:
            self._tell(file, have_bytes)
            self.again_bytes += max(0, self._last.get(file.name, 0) - have_bytes)
            self._last[file.name] = have_bytes
            if have_bytes > self._most.setdefault(file.name, have_bytes):
                self._most[file.name] = have_bytes
                self._waits.moved()
            self._waits.demand_time(file, self._why.get(file.name))

        into = self._inventory.artifacts
        fetch = partial(self._source.fetch, file.name, file.bytes, file.sha256, into, on_progress=on_progress)
        try:
            fetch()
        except HeldElsewhere:
            if not self._is_stuck(file):
                raise
            fetch(aside=True)

    def _is_stuck(self, file: ManifestFile) -> bool:
        """Return whether the process that holds the file open has added nothing to it for a while."""
        noted, now_mono = noted_bytes(self._inventory.artifacts, file.sha256), self._clock.monotonic()
        before, since_mono = self._held.get(file.name, (-1, now_mono))
        if noted != before:
            self._held[file.name] = noted, now_mono
        return noted == before and now_mono - since_mono >= STUCK_S


class BackgroundDownload:
    """Downloads finished checkpoints from `far` during training; without `far` it does nothing.

    A lost machine then loses only the newest files. It has its own thread and connections, so that the watch never
    waits for it. A failure is retried at the next checkpoint, and at the end by the collect step, which continues from
    here.
    """

    def __init__(
        self, far: FarSide | None, folder: RunFolder, budget: EgressBudget, clock: Clock, is_attended: bool = False
    ) -> None:
        """With `is_attended` other files are worth their egress too, as far as the plan pays for it."""
        self._is_attended = is_attended
        self._far = far.lane() if far is not None else None
        self._inventory = Inventory(folder)
        self._budget = budget
        self._clock = clock
        self._has_news, self._over = threading.Event(), threading.Event()
        self._listing_s = 0.0
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> BackgroundDownload:
        if self._far is not None:
            if os.path.exists(self._inventory.folder.events):  # An earlier supervisor may have left a file half done.
                self._has_news.set()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._has_news.set()
        if self._far is not None:
            self._far.close()  # This wakes a fetch that has stalled.
            self._thread.join(JOIN_S)  # One that waits on a dead line is left: it could only write the same bytes.
            self._far.close()

    def look(self, events: Iterable[TrainerEvent]) -> None:
        """Take in the trainer's events since the last look."""
        if any(isinstance(event, CheckpointEvent) or event.kind == "output" for event in events):
            self._has_news.set()

    def _work(self) -> None:
        assert self._far is not None
        wait_s: float | None = None
        while not self._over.is_set():
            self._has_news.wait(wait_s)
            if self._listing_s > QUICK_S:  # A slow list is not requested again at once.
                self._over.wait(REST * self._listing_s)
            self._has_news.clear()
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
        """Fetch finished files, latest checkpoint first; before and after, remove files that newer ones replaced."""
        began_mono = self._clock.monotonic()
        manifest = far.manifest(MOST_ANNOUNCED_BYTES)
        self._inventory.remember(manifest)
        self._listing_s = self._clock.monotonic() - began_mono
        self._remove_replaced(manifest)
        files = self._affordable(manifest)
        before = self._inventory.memory
        self._inventory.note(files=tuple(sorted({*before.files, *(file.name for file in files)})))
        waits = _Came(self._clock, self._over)
        downloads = Downloader(far, self._inventory, waits, self._clock, waits.tell)
        downloads.bring(files)
        self._inventory.note(bytes_per_s=waits.bytes_per_s or before.bytes_per_s)
        for why in downloads.missing.values():
            if not isinstance(why, FarRefusal):  # A refused file has since been replaced by a newer one.
                raise why
        waits.raise_if_stopped()  # The collect step records what it finds: after that, nothing is removed.
        self._let_go(manifest, {*downloads.here})

    def _affordable(self, manifest: Manifest) -> list[ManifestFile]:
        """Return the files to download now, latest checkpoint first; if egress is charged, only that, now and then."""
        if self._budget.limit_bytes is not None:
            if self._is_attended:
                return [file for file in sorted(manifest.files, key=_by_size) if self._budget.take([file])]
            latest = [file for file in manifest.files if file.step == manifest.latest]
            return latest if self._budget.take(latest, by_step=manifest.latest or 0) else []
        return sorted(
            manifest.files, key=lambda file: (file.step != manifest.latest, file.bytes >= SMALL_BYTES, file.name)
        )

    def _let_go(self, manifest: Manifest, here: set[str]) -> None:
        """Note the newest checkpoint if all of it is `here`, verified; remove the older ones that it replaced."""
        newest = [file for file in manifest.files if file.step == manifest.latest and file.kind != "sample"]
        if newest and {file.name for file in newest} <= here:
            self._inventory.note(step=manifest.latest, whole=tuple(newest))
            self._remove_replaced(manifest)

    def _remove_replaced(self, manifest: Manifest) -> None:
        """Remove files downloaded here that are no longer on the list, if a newer whole checkpoint is here."""
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
    """The watch is over; never seen outside this module."""

    def __init__(self) -> None:
        super().__init__("early.stopped", "Training has ended.", hint="Nothing to do.")


class _Came(Waits):
    """Measures download speed: the bytes that came while a fetch was under way, and in how many seconds."""

    def __init__(self, clock: Clock, over: threading.Event) -> None:
        self._clock, self._over, self._bytes, self._seconds = clock, over, 0, 0.0
        self._last: tuple[str, int, float] = "", 0, 0.0

    def raise_if_stopped(self) -> None:
        """Raise `_Stopped` once the watch is over."""
        if self._over.is_set():
            raise _Stopped

    def tell(self, file: ManifestFile, have_bytes: int) -> None:
        """Note that this many bytes of a file are here."""
        (name, before, since_mono), now_mono = self._last, self._clock.monotonic()
        if name == file.name:
            self._bytes += max(0, have_bytes - before)
            self._seconds += now_mono - since_mono
        self._last = file.name, have_bytes, now_mono

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second; None if the time was too short to measure."""
        return self._bytes / self._seconds if self._seconds > 1.0 else None
