"""The collect step's way with files: the worthiest first, and none that is held up keeps the others waiting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from gpurun.core.errors import CollectFailed, GpurunError, StoreFull, TrainingFailed
from gpurun.core.moving import Tell
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.context import Context, Note, instance_of
from gpurun.lifecycle.home.at_home import is_here
from gpurun.lifecycle.home.held import Held
from gpurun.lifecycle.patience import Patience, lost
from gpurun.machine.answers import ManifestFile
from gpurun.machine.base import FarRefusal, MachineLost
from gpurun.machine.far import FarSide
from gpurun.machine.partial import HeldElsewhere

LOOK_AGAIN_S = 5.0


class Bringing:
    """Files on their way home: those that are `here`, verified, and why each of the `missing` is not.

    `gone` is set once the instance is given up; from then on only what is here already is found.
    """

    def __init__(self, far: FarSide, state: RunState, context: Context, patience: Patience, tell: Tell) -> None:
        self._far, self._state, self._context, self._patience, self._tell = far, state, context, patience, tell
        self.here: dict[str, ManifestFile] = {}
        self.missing: dict[str, GpurunError] = {}
        self.gone: TrainingFailed | None = None
        self._why: dict[str, GpurunError] = {}
        self._held = Held(context.folder.artifacts, context.clock)
        self._most: dict[str, int] = {}
        self._told: set[str] = set()
        self._here_bytes = 0

    def bring(self, files: Sequence[ManifestFile]) -> Iterator[Note]:
        """Bring files while the lease lasts; one that there is no room for, or that somebody else holds, comes later.

        A note says, once for each, what there is no room for.
        """
        waiting = list(files)
        while waiting and self.gone is None:
            try:
                waiting = [file for file in waiting if not self._is_settled(file)]
                held = [self._why[file.name] for file in waiting]
                if any(isinstance(why, StoreFull | HeldElsewhere) for why in held):
                    yield from self._wait(held)
            except TrainingFailed as gone:
                self.gone = gone
        if self.gone is not None:
            self.find(waiting)
            unsettled = (file.name for file in waiting if file.name not in {*self.here, *self.missing})
            self.missing |= dict.fromkeys(unsettled, self.gone)

    def find(self, files: Iterable[ManifestFile]) -> None:
        """Count what came home before of files that are not fetched any more, or not worth a paid minute."""
        for file in files:
            if file.name not in {*self.here, *self.missing} and self._is_here(file):
                self._take(file)

    def _is_settled(self, file: ManifestFile) -> bool:
        """Whether a file is here or given up; otherwise the others come first, and it is tried again after them."""
        while True:
            if self._context.seconds_left(self._state) <= 0 and not self._is_here(file):
                self.missing[file.name] = self._late(file)
                return True
            most = self._most.get(file.name)
            try:
                self._fetch(file)
            except (StoreFull, HeldElsewhere) as error:
                self._why[file.name] = error
                return False
            except (MachineLost, FarRefusal) as error:
                self._why[file.name] = error
                try:
                    self._patience.wait(error)
                except FarRefusal as refusal:
                    self.missing[file.name] = refused(refusal)
                    return True
                if self._most.get(file.name) == most:  # It may be this file alone that does not come.
                    return False
            except CollectFailed as error:
                self.missing[file.name] = error
                return True
            else:
                self._patience.moved()
                self._take(file)
                return True

    def _fetch(self, file: ManifestFile) -> None:
        """Fetch one file; what is here with the right digest is not fetched again, however late it is."""
        self._context.heed(self._state)

        def go_on(have_bytes: int) -> None:
            self._tell(self._here_bytes + have_bytes)
            self._context.heed(self._state)
            if have_bytes > self._most.setdefault(file.name, have_bytes):
                self._most[file.name] = have_bytes
                self._patience.moved()
            if self._context.seconds_left(self._state) <= 0:
                raise self._late(file)

        into = self._context.folder.artifacts
        fetch = partial(self._far.fetch, file.name, file.bytes, file.sha256, into, on_progress=go_on)
        self._held.past(file, fetch)

    def _wait(self, held: Iterable[GpurunError]) -> Iterator[Note]:
        """Wait for this disk, or for somebody else, while there is an instance to wait with."""
        for full in held:
            if isinstance(full, StoreFull) and full.what not in self._told:
                self._told.add(full.what)
                yield Event.INCIDENT, {"code": full.code, "message": f"{full.what} {full.hint}"}
        if self._context.is_down(instance_of(self._state)):
            raise lost("its provider says that it no longer runs.")
        self._context.clock.sleep(min(LOOK_AGAIN_S, max(0.0, self._context.seconds_left(self._state))))

    def _take(self, file: ManifestFile) -> None:
        self.here[file.name] = file
        self._here_bytes += file.bytes

    def _is_here(self, file: ManifestFile) -> bool:
        return is_here(self._context.folder.artifacts, file)

    def _late(self, file: ManifestFile) -> CollectFailed:
        """The error of a file that did not come in time, and what it had waited for."""
        why = self._why.get(file.name)
        what = f"The lease was over before {file.name} ({file.bytes:,} bytes) had come home."
        hint = "What came home before is kept. Give the next run more --hours, or more room here."
        return CollectFailed("collect.lease_over", f"{what} {why.what}" if why else what, hint=hint)


def refused(refusal: FarRefusal) -> CollectFailed:
    """What the far side would not give, or gave as nonsense, as what it means here: something did not come home."""
    return CollectFailed(refusal.code, refusal.what, hint="What came home before is kept, and the instance destroyed.")
