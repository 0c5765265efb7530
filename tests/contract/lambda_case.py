"""Lambda for the contract suite: the real provider against the emulator, with machines that are active at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun.core.clock import SystemClock
from gpurun.core.model import Teardown
from gpurun.core.secrets import Secret
from gpurun.providers.base import Provider, Traits
from gpurun.providers.lambdalabs import LambdaProvider, Pace
from tests.emulators.lambda_cloud import KEY, LambdaEmulator

QUICK = Traits(
    settle_s=0.5, poll_s=0.05, death_reads=3, death_spread_s=0.2, teardown=Teardown.DESTROYED, console_url="emulator"
)


@contextmanager
def case(tmp_path: Path) -> Iterator[Provider]:
    """A provider of an account without instances, and without its rate limits; what a test leaves is switched off."""
    with LambdaEmulator() as emulator:
        emulator.world.terminating_s = emulator.world.terminated_s = 0.1
        emulator.limits.gap_s = emulator.limits.launch_gap_s = 0.0
        pace = Pace(request_s=0.0, launch_s=0.0)
        yield LambdaProvider(Secret(KEY), SystemClock(), base_url=emulator.base_url, traits=QUICK, pace=pace)
    assert emulator.violations == []
