"""RunPod as its documents describe it, on this machine: REST v2, as much GraphQL as gpurun asks, and its faults."""

from __future__ import annotations

from tests.emulators.runpod.emulator import FULL_KEY, READ_KEY, RunPodEmulator
from tests.emulators.runpod.guest import FakeGuest, real_guest
from tests.emulators.runpod.server import Fault

__all__ = ["FULL_KEY", "READ_KEY", "FakeGuest", "Fault", "RunPodEmulator", "real_guest"]
