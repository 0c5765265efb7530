"""RunPod for the contract suite: the real provider against the emulator, with pods that start at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun.core.clock import SystemClock
from gpurun.core.model import Teardown
from gpurun.core.secrets import Secret
from gpurun.providers.base import Provider, Traits
from gpurun.providers.runpod import RunPodProvider
from tests.emulators.runpod import FULL_KEY, RunPodEmulator

QUICK = Traits(
    settle_s=0.5, poll_s=0.05, death_reads=3, death_spread_s=0.2, teardown=Teardown.DESTROYED, console_url="emulator"
)


@contextmanager
def case(tmp_path: Path) -> Iterator[Provider]:
    """A provider of an account without pods; whatever a test leaves is switched off."""
    with RunPodEmulator() as emulator:
        emulator.world.terminated_s = 0.1
        yield RunPodProvider(Secret(FULL_KEY), SystemClock(), base_url=emulator.base_url, traits=QUICK)
    assert emulator.violations == []
