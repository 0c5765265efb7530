"""AWS for the contract: its emulator, with machines that are nothing but an address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from gpurun.providers.aws import AwsProvider
from gpurun.providers.base import Provider
from tests.contract.orders import CLOCK
from tests.emulators.aws import AwsEmulator


@contextmanager
def case(folder: Path) -> Iterator[Provider]:
    """A provider whose SDK is pointed at the emulator."""
    with AwsEmulator(clock=CLOCK, tick_s=None) as emulator, patch.dict(os.environ, emulator.environment):
        emulator.rules.image_gb = 8
        yield AwsProvider(CLOCK)
