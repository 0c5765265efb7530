"""What is finished comes home while training goes on, from a thread of its own beside the watch."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from types import TracebackType

from gpurun.core.artifact_names import path_of
from gpurun.core.clock import Clock
from gpurun.core.errors import GpurunError
from gpurun.core.paths import RunFolder
from gpurun.core.trainer_events import Checkpoint, TrainerEvent
from gpurun.lifecycle.artifacts.downloader import Downloader, Waits
from gpurun.lifecycle.artifacts.inventory import EgressBudget, Inventory
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile
from gpurun.remote.small_files import SMALL_BYTES

# How soon the watch tries again what it could not bring, and for how long it waits for a download that it ends.
AGAIN_S, JOIN_S = 60.0, 3.0
# After a list that took longer, the next is not asked for before so many times its time is over.
QUICK_S, REST = 0.5, 10


class Background:
    """Brings finished checkpoints home from `far` while training goes on; without `far` it does nothing.

    What is lost with a machine is then no more than the latest of them. It has a thread and connections of its own, so
    that the watch never waits for it; what fails is tried again at the next checkpoint, and in the end by the collect
    step, which goes on where this stopped.
    """

    def __init__(self, far: FarSide | None, folder: RunFolder, budget: EgressBudget, clock: Clock) -> None:
        self._far = far.lane() if far is not None else None
        self._inventory = Inventory(folder)
        self._budget = budget
        self._clock = clock
        self._told, self._over = threading.Event(), threading.Event()
        self._listing_s = 0.0
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Background:
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
        if any(isinstance(event, Checkpoint) or event.kind == "output" for event in events):
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
            if not noted.whole or not all(path_of(artifacts, file.name).is_file() for file in noted.whole):
                return
            for name in {*noted.files} - needed - {*noted.kept}:
                path_of(artifacts, name).unlink(missing_ok=True)
            self._inventory.write(noted, files=tuple(name for name in noted.files if name in needed))


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
