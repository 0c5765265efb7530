"""Checkpoints come home while training goes on: what is lost with a machine is then no more than the latest of them.

It is done on a thread and connections of its own, so that the watch never waits for it; whatever goes wrong here is
tried again at the next checkpoint, and in the end by the collect step, which goes on where this stopped.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from gpurun.core.errors import GpurunError
from gpurun.core.paths import RunFolder
from gpurun.lifecycle.home.allowance import Allowance
from gpurun.lifecycle.home.at_home import Brought, kept, remember
from gpurun.machine.answers import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile
from gpurun.machine.base import FarRefusal
from gpurun.machine.far import FarSide

AGAIN_S = 60.0
JOIN_S = 3.0
_MARK = b'"checkpoint"'


class Stopped(GpurunError):
    """The watch is over; never seen outside."""

    def __init__(self) -> None:
        super().__init__("early.stopped", "Training has ended.", hint="Nothing to do.")


class Early:
    """Fetches finished checkpoints, as they are told of, from `far` into a run's artifacts; without `far`, nothing.

    What it has fetched, and which one is here whole, is noted in the run's folder (`at_home.Brought`).
    """

    def __init__(self, far: FarSide | None, folder: RunFolder, allowance: Allowance) -> None:
        self._far = far.lane() if far is not None else None
        self._folder = folder
        self._allowance = allowance
        self._told, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Early:
        if self._far is not None:
            if os.path.exists(self._folder.events):  # An earlier supervisor may have left something half way.
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

    def look(self, events: bytes) -> None:
        """Take in what the trainer has said since the last look."""
        if _MARK in events:
            self._told.set()

    def _work(self) -> None:
        assert self._far is not None
        wait_s: float | None = None
        while not self._over.is_set():
            self._told.wait(wait_s)
            self._told.clear()
            try:
                if not self._over.is_set():
                    self.bring(self._far)
                wait_s = None
            except Stopped:
                break
            except GpurunError as error:
                wait_s = AGAIN_S
                logging.info("not home yet: %s: %s", error.code, error.what)
            except OSError as error:
                wait_s = AGAIN_S
                logging.warning("not home yet: this machine's disk: %s", error)
        self._far.close()  # Whoever ended the watch may not have waited for this.

    def bring(self, far: FarSide) -> None:
        """Fetch what is finished, the latest first; before and after that, let go of what newer ones have replaced."""
        artifacts = self._folder.artifacts
        manifest = far.manifest(MOST_ANNOUNCED_BYTES)
        remember(self._folder, manifest)
        self._remove_replaced(manifest)
        before, here = Brought.read(self._folder), set[str]()
        for file in self._affordable(manifest):
            self._heed()
            before = before.model_copy(update={"files": tuple(sorted({*before.files, file.name}))})
            before.write(self._folder)
            with suppress(FarRefusal):  # It has been replaced by a newer one since.
                far.fetch(file.name, file.bytes, file.sha256, artifacts, on_progress=lambda _: self._heed())
                here.add(file.name)
        self._heed()  # What the collect step finds it has on record: from then on nothing is removed.
        self._let_go(manifest, before.files, here)

    def _affordable(self, manifest: Manifest) -> list[ManifestFile]:
        """What may come home now, the latest checkpoint first; where that costs money it comes alone, now and then."""
        if self._allowance.limit_bytes is not None:
            latest = [file for file in manifest.files if file.step == manifest.latest]
            return latest if self._allowance.take(latest, by_step=manifest.latest or 0) else []
        return sorted(manifest.files, key=lambda file: (file.step != manifest.latest, file.name))

    def _let_go(self, manifest: Manifest, brought: Iterable[str], here: set[str]) -> None:
        """Name the newest checkpoint if all of it is `here`, verified; remove the older ones that it has replaced."""
        newest = [file for file in manifest.files if file.step == manifest.latest and file.kind != "sample"]
        if newest and {file.name for file in newest} <= here:
            Brought(step=manifest.latest, files=tuple(brought), whole=tuple(newest)).write(self._folder)
            self._remove_replaced(manifest)

    def _remove_replaced(self, manifest: Manifest) -> None:
        """Remove what came by this way and is not on the list any more, if a newer checkpoint is here whole."""
        noted, artifacts = Brought.read(self._folder), self._folder.artifacts
        needed = {file.name for file in (*manifest.files, *noted.whole)}
        if not noted.whole or not all((artifacts / file.name).is_file() for file in noted.whole):
            return
        for name in {*noted.files} - needed - kept(self._folder):
            (artifacts / name).unlink(missing_ok=True)
        files = tuple(name for name in noted.files if name in needed)
        noted.model_copy(update={"files": files}).write(self._folder)

    def _heed(self) -> None:
        if self._over.is_set():
            raise Stopped
