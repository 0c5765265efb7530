"""Lambda Cloud on this computer, by its documentation: REST v1, its two rate limits, its bill, and its faults."""

from __future__ import annotations

from tests.emulators.lambda_cloud.emulator import KEY, LambdaEmulator
from tests.emulators.lambda_cloud.guest import FakeGuest, real_guest
from tests.emulators.lambda_cloud.problems import Problem
from tests.emulators.lambda_cloud.server import Fault, Lie

__all__ = ["KEY", "FakeGuest", "Fault", "LambdaEmulator", "Lie", "Problem", "real_guest"]
