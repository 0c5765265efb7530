"""RunPod on this computer, by its documentation: REST v2, the GraphQL that gpurun uses, and its faults."""

from __future__ import annotations

from tests.emulators.runpod.emulator import FULL_KEY, READ_KEY, RunPodEmulator
from tests.emulators.runpod.guest import FakeGuest, real_guest
from tests.emulators.runpod.server import Fault

__all__ = ["FULL_KEY", "READ_KEY", "FakeGuest", "Fault", "RunPodEmulator", "real_guest"]
