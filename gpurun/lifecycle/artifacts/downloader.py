"""The one way in which files come home, from a machine or from a bucket, and how long it waits for one.

The order is the caller's, and a file that is held up keeps no other one waiting.
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

# A process that holds a file and has added nothing to it for so long was stopped, as by ^Z.
STUCK_S = 60.0
# How soon the watch tries again what it could not bring, and for how long it waits for a download that it ends.
AGAIN_S, JOIN_S = 60.0, 3.0
# After a list that took longer, the next is not asked for before so many times its time is over.
QUICK_S, REST = 0.5, 10
LOOK_FILES = 256
"""After so many small files it is looked whether there is time for more."""

T = TypeVar("T")

# Is called with each file that is coming and how many bytes of it are here; 0 where it begins again.
Tell = Callable[[ManifestFile, int], object]


class FileSource(Protocol):
    """Where files come from; see `gpurun.remote.download.fetch`."""

    def fetch(
        self, name: str, size_bytes: int, sha256: str, into: Path, *,
        on_progress: Callable[[int], None] | None = None, aside: bool = False,
    ) -> Path: ...  # fmt: skip

    def gather(self, files: Sequence[ManifestFile], take: TakeFile) -> list[ManifestFile]:
        """Hand over many small files; those that are not there any more."""
        ...


class Waits:
    """What is done about a file that does not come; here nothing: the first trouble ends the download."""

    for_room = False
    """Whether a file for which this disk has no room is waited for, once the others are here."""

    def raise_if_stopped(self) -> None:
        """Raise what ends everything, as a request to stop does."""

    def demand_time(self, file: ManifestFile, why: GpurunError | None) -> None:
        """See `raise_if_stopped`; CollectFailed where no time is left for this file, which was held up by `why`."""
        self.raise_if_stopped()

    def moved(self) -> None:
        """Take note that something has come."""

    def wait(self, error: MachineLost | FarRefusal) -> None:
        """Pause before the next try, or raise: a FarRefusal is about one file, anything else about all."""
        raise error

    def hold(self, held: Sequence[GpurunError]) -> None:
        """Pause while this disk, or somebody else who brings them, holds up all files that are left."""
        raise held[0]

    def until_done(self, attempt: Callable[[], T]) -> T:
        """Return what the attempt answers in the end; it is made again as `wait` says."""
        while True:
            self.raise_if_stopped()
            try:
                answer = attempt()
            except (MachineLost, FarRefusal) as error:
                self.wait(error)
            else:
                self.moved()
                return answer


class Downloader:
    """Files on their way home: those that are `here`, verified, and why each of the `missing` is not.

    `gone` is set once the source is given up; from then on only what is here already is found. `again_bytes` came a
    second time, after a line was cut or a digest was wrong.
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
        """Count a file that is here, verified."""
        self.here_bytes += file.bytes if file.name not in self.here else 0
        self.here[file.name] = file

    def _is_settled(self, file: ManifestFile) -> bool:
        """Whether a file is here or given up."""
        return file.name in self.here or file.name in self.missing

    def bring(self, files: Iterable[ManifestFile]) -> None:
        """Bring files in their order; one that is held up comes after the others."""
        deque(self.each(files), maxlen=0)

    def each(self, files: Iterable[ManifestFile]) -> Iterator[StoreFull]:
        """The same, and whenever all that is left is held up, what this disk has no room for."""
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
        """Count what came home before of files that are not fetched any more, or not worth a paid minute."""
        for file in files:
            if not self._is_settled(file) and self._inventory.has(file):
                self._count(file)

    def _left_of(self, waiting: list[ManifestFile]) -> list[ManifestFile]:
        """Bring files in their order, many small ones in one stream; what is not done after that."""
        left: list[ManifestFile] = []
        for is_small, run in groupby(waiting, key=lambda file: file.bytes < SMALL_BYTES):
            files = [file for file in run if not self._is_settled(file)]
            for some in group_files(files) if is_small and len(files) >= LEAST_FILES else ():
                self._gather(some)
            left += [file for file in files if not self._is_done(file)]
        return left

    def _gather(self, files: Sequence[ManifestFile]) -> None:
        """Bring small files together; what does not come so is fetched by itself afterwards, with its own reason."""

        def take(file: ManifestFile, content: bytes) -> None:
            if len(self.here) % LOOK_FILES == 0:
                self._waits.demand_time(file, None)
            if self._inventory.put(file, content):
                came.append(file)
                self._waits.moved()
                self._count(file)
                self._tell(file, 0)

        came: list[ManifestFile] = []
        self.find(files)
        if sum(file.bytes for file in files) > room_in(self._inventory.artifacts):
            return
        while left := [file for file in files if not self._is_settled(file)]:
            try:
                self._waits.demand_time(left[0], None)
                for file in left:
                    self._inventory.demand_planned(file)
                gone = FarRefusal("no_such_file", "it is not there any more as it was announced")
                self.missing |= dict.fromkeys((file.name for file in self._source.gather(left, take)), gone)
            except MachineLost as lost:
                self._waits.wait(lost)
                continue
            except (FarRefusal, CollectFailed, OSError) as error:
                logging.info("many files did not come together: %s", error)
            break
        if came:
            os.sync()  # Once for all of them, and before anything counts on it.

    def _is_done(self, file: ManifestFile) -> bool:
        """Whether a file is here or given up; otherwise the others come first, and it is tried again after them."""
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
                if self._most.get(file.name) == most:  # It may be this file alone that does not come.
                    return False
                continue
            except CollectFailed as error:  # However late it is, what is here with the right digest counts.
                if self._inventory.has(file):
                    self._count(file)
                else:
                    self.missing[file.name] = error
            else:
                self._waits.moved()
                self._count(file)
        return True

    def _fetch(self, file: ManifestFile) -> None:
        """Fetch one file, unless it is here; past the process that has it open, where that is stuck."""

        def go_on(have_bytes: int) -> None:
            self._tell(file, have_bytes)
            self.again_bytes += max(0, self._last.get(file.name, 0) - have_bytes)
            self._last[file.name] = have_bytes
            if have_bytes > self._most.setdefault(file.name, have_bytes):
                self._most[file.name] = have_bytes
                self._waits.moved()
            self._waits.demand_time(file, self._why.get(file.name))

        into = self._inventory.artifacts
        fetch = partial(self._source.fetch, file.name, file.bytes, file.sha256, into, on_progress=go_on)
        try:
            fetch()
        except HeldElsewhere:
            if not self._is_stuck(file):
                raise
            fetch(aside=True)

    def _is_stuck(self, file: ManifestFile) -> bool:
        """Whether the process that has that file open has brought nothing of it for a while."""
        noted, now_mono = noted_bytes(self._inventory.artifacts, file.sha256), self._clock.monotonic()
        before, since_mono = self._held.get(file.name, (-1, now_mono))
        if noted != before:
            self._held[file.name] = noted, now_mono
        return noted == before and now_mono - since_mono >= STUCK_S


class BackgroundDownload:
    """Brings finished checkpoints home from `far` while training goes on; without `far` it does nothing.

    What is lost with a machine is then no more than the latest of them. It has a thread and connections of its own, so
    that the watch never waits for it; what fails is tried again at the next checkpoint, and in the end by the collect
    step, which goes on where this stopped.
    """

    def __init__(
        self, far: FarSide | None, folder: RunFolder, budget: EgressBudget, clock: Clock, is_attended: bool = False
    ) -> None:
        """With `is_attended` other files are worth their egress too, as far as the plan has paid for it."""
        self._is_attended = is_attended
        self._far = far.lane() if far is not None else None
        self._inventory = Inventory(folder)
        self._budget = budget
        self._clock = clock
        self._told, self._over = threading.Event(), threading.Event()
        self._listing_s = 0.0
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> BackgroundDownload:
        if self._far is not None:
            if os.path.exists(self._inventory.folder.events):  # An earlier supervisor may have left something half way.
                self._told.set()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._told.set()
        if self._far is not None:
            self._far.close()  # A fetch that has stalled is woken by it.
            self._thread.join(JOIN_S)  # One that waits for a dead line is left: what it may write is the same.
            self._far.close()

    def look(self, events: Iterable[TrainerEvent]) -> None:
        """Take in what the trainer has said since the last look."""
        if any(isinstance(event, CheckpointEvent) or event.kind == "output" for event in events):
            self._told.set()

    def _work(self) -> None:
        assert self._far is not None
        wait_s: float | None = None
        while not self._over.is_set():
            self._told.wait(wait_s)
            if self._listing_s > QUICK_S:  # A list that takes long is not asked for again and again.
                self._over.wait(REST * self._listing_s)
            self._told.clear()
            try:
                if not self._over.is_set():
                    self.bring(self._far)
                wait_s = None
            except _Stopped:
                break
            except GpurunError as error:
                wait_s = AGAIN_S
                logging.info("not home yet: %s: %s", error.code, error.what)
            except OSError as error:
                wait_s = AGAIN_S
                logging.warning("not home yet: this machine's disk: %s", error)
        self._far.close()  # The watch may have ended without waiting for this.

    def bring(self, far: FarSide) -> None:
        """Fetch what is finished, the latest first; before and after that, let go of what newer ones have replaced."""
        began_mono = self._clock.monotonic()
        manifest = far.manifest(MOST_ANNOUNCED_BYTES)
        self._inventory.remember(manifest)
        self._listing_s = self._clock.monotonic() - began_mono
        self._remove_replaced(manifest)
        files = self._affordable(manifest)
        before = self._inventory.memory
        self._inventory.note(files=tuple(sorted({*before.files, *(file.name for file in files)})))
        came = _Came(self._clock, self._over)
        downloads = Downloader(far, self._inventory, came, self._clock, came.tell)
        downloads.bring(files)
        self._inventory.note(bytes_per_s=came.bytes_per_s or before.bytes_per_s)
        for why in downloads.missing.values():
            if not isinstance(why, FarRefusal):  # That one has been replaced by a newer one since.
                raise why
        came.raise_if_stopped()  # What the collect step finds it has on record: from then on nothing is removed.
        self._let_go(manifest, {*downloads.here})

    def _affordable(self, manifest: Manifest) -> list[ManifestFile]:
        """What may come home now, the latest checkpoint first; where that costs money it comes alone, now and then."""
        if self._budget.limit_bytes is not None:
            if self._is_attended:
                return [file for file in sorted(manifest.files, key=_by_size) if self._budget.take([file])]
            latest = [file for file in manifest.files if file.step == manifest.latest]
            return latest if self._budget.take(latest, by_step=manifest.latest or 0) else []
        return sorted(
            manifest.files, key=lambda file: (file.step != manifest.latest, file.bytes >= SMALL_BYTES, file.name)
        )

    def _let_go(self, manifest: Manifest, here: set[str]) -> None:
        """Name the newest checkpoint if all of it is `here`, verified; remove the older ones that it has replaced."""
        newest = [file for file in manifest.files if file.step == manifest.latest and file.kind != "sample"]
        if newest and {file.name for file in newest} <= here:
            self._inventory.note(step=manifest.latest, whole=tuple(newest))
            self._remove_replaced(manifest)

    def _remove_replaced(self, manifest: Manifest) -> None:
        """Remove what came by this way and is not on the list any more, if a newer checkpoint is here whole."""
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
    """The watch is over; never seen outside."""

    def __init__(self) -> None:
        super().__init__("early.stopped", "Training has ended.", hint="Nothing to do.")


class _Came(Waits):
    """How fast files come: the bytes that came while somebody waited for them, in how many seconds."""

    def __init__(self, clock: Clock, over: threading.Event) -> None:
        self._clock, self._over, self._bytes, self._seconds = clock, over, 0, 0.0
        self._last: tuple[str, int, float] = "", 0, 0.0

    def raise_if_stopped(self) -> None:
        """Raise what ends the thread once the watch is over."""
        if self._over.is_set():
            raise _Stopped

    def tell(self, file: ManifestFile, have_bytes: int) -> None:
        """So much of a file is here."""
        (name, before, since_mono), now_mono = self._last, self._clock.monotonic()
        if name == file.name:
            self._bytes += max(0, have_bytes - before)
            self._seconds += now_mono - since_mono
        self._last = file.name, have_bytes, now_mono

    @property
    def bytes_per_s(self) -> float | None:
        """None for what came too quickly to say."""
        return self._bytes / self._seconds if self._seconds > 1.0 else None
