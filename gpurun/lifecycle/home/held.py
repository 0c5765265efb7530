"""Files that somebody else has open on their way home, and whether he goes on with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpurun.core.clock import Clock
from gpurun.machine.answers import ManifestFile
from gpurun.machine.fetch import noted_bytes
from gpurun.machine.partial import HeldElsewhere

# Whoever holds a file and has added nothing to it for so long was stopped, as by ^Z.
STUCK_S = 60.0


class Held:
    """What others have of files, each time that one was found held."""

    def __init__(self, artifacts: Path, clock: Clock) -> None:
        self._artifacts, self._clock = artifacts, clock
        self._noted: dict[str, tuple[int, float]] = {}

    def past(self, file: ManifestFile, fetch: Callable[..., object]) -> None:
        """Fetch a file, and past whoever holds it if he is stuck; HeldElsewhere while he goes on."""
        try:
            fetch()
        except HeldElsewhere:
            if not self._is_stuck(file):
                raise
            fetch(aside=True)

    def _is_stuck(self, file: ManifestFile) -> bool:
        """Whether whoever has that file open has brought nothing of it for a while."""
        noted, now_mono = noted_bytes(self._artifacts, file.sha256), self._clock.monotonic()
        before, since_mono = self._noted.get(file.name, (-1, now_mono))
        if noted != before:
            self._noted[file.name] = noted, now_mono
        return noted == before and now_mono - since_mono >= STUCK_S
