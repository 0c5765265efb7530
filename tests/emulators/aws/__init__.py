"""AWS on this machine: moto's EC2 behind a door that adds what moto leaves out, above all what costs money.

A launch is idempotent by its client token; capacity, quotas and permissions run out; schedules fire; an instance is
pending before it runs, has a guest, and ends by its own power-off. `AwsEmulator.meter` is what it all would cost.
"""

from __future__ import annotations

from tests.emulators.aws.calls import Fault
from tests.emulators.aws.emulator import AwsEmulator
from tests.emulators.aws.guest import FakeGuest, Machine, real_guest

__all__ = ["AwsEmulator", "FakeGuest", "Fault", "Machine", "real_guest"]
