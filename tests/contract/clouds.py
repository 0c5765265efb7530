"""The three clouds for the contract's tests: each real provider, with an emulator whose machines start quickly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from gpurun.core.records import Teardown
from gpurun.core.secrets import Secret
from gpurun.providers.aws import AwsProvider
from gpurun.providers.base import Provider, Traits
from gpurun.providers.lambdalabs import LambdaProvider, Pace
from gpurun.providers.runpod import RunPodProvider
from tests.contract.orders import CLOCK
from tests.emulators.aws import AwsEmulator
from tests.emulators.lambda_cloud import KEY, LambdaEmulator
from tests.emulators.runpod import FULL_KEY, RunPodEmulator

QUICK = Traits(
    settle_s=0.5, poll_s=0.05, death_reads=3, death_spread_s=0.2, teardown=Teardown.DESTROYED, console_url="emulator"
)
_OTHER_KEY = KEY.replace("test", "else")


@dataclass(frozen=True)
class Customers:
    """Providers of one cloud: `mine`; `again` opens the same account anew; `stranger` opens another customer's."""

    mine: Provider
    again: Callable[[], Provider]
    stranger: Callable[[], Provider]


@contextmanager
def runpod() -> Iterator[Customers]:
    """Yield the providers of two accounts without pods."""

    def opened(emulator: RunPodEmulator) -> Provider:
        return RunPodProvider(Secret(FULL_KEY), CLOCK, base_url=emulator.base_url, traits=QUICK)

    with RunPodEmulator() as emulator, RunPodEmulator() as other:
        emulator.world.terminated_s = 0.1
        yield Customers(opened(emulator), lambda: opened(emulator), lambda: opened(other))
    assert emulator.violations == []


@contextmanager
def lambda_cloud() -> Iterator[Customers]:
    """Yield the providers of two accounts without instances, at a cloud without rate limits."""

    def opened(key: str) -> Provider:
        pace = Pace(request_s=0.0, launch_s=0.0)
        return LambdaProvider(Secret(key), CLOCK, base_url=emulator.base_url, traits=QUICK, pace=pace)

    with LambdaEmulator() as emulator:
        emulator.world.terminating_s = emulator.world.terminated_s = 0.1
        emulator.limits.gap_s = emulator.limits.launch_gap_s = 0.0
        yield Customers(opened(KEY), lambda: opened(KEY), lambda: opened(_OTHER_KEY))
    assert emulator.violations == []


@contextmanager
def aws() -> Iterator[Customers]:
    """Yield the providers of two accounts; the environment directs the SDK to the emulator."""

    def stranger() -> Provider:
        os.environ["AWS_ACCESS_KEY_ID"] = "AKIASTRANGER"
        return AwsProvider(CLOCK)

    with AwsEmulator(clock=CLOCK, tick_s=None) as emulator, patch.dict(os.environ, emulator.environment):
        emulator.rules.image_gb = 8
        emulator.rules.strangers = {"AKIASTRANGER": "210987654321"}
        yield Customers(AwsProvider(CLOCK), lambda: AwsProvider(CLOCK), stranger)


CLOUDS: dict[str, Callable[[], AbstractContextManager[Customers]]] = {
    "runpod": runpod, "lambda": lambda_cloud, "aws": aws
}  # fmt: skip


def case(name: str) -> Callable[[Path], AbstractContextManager[Provider]]:
    """Return a function that opens one account of a cloud; the function ignores the folder that it is given."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Provider]:
        with CLOUDS[name]() as customers:
            yield customers.mine

    return opened
