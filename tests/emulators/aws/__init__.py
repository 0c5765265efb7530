"""AWS on this computer: moto's EC2, with what moto leaves out, above all what costs money.

A launch is idempotent by its client token; capacity, quotas and permissions can run out; schedules fire. An instance
is pending before it runs, has a guest, and ends when it powers itself off. `AwsEmulator.world.meter` adds up the cost.
"""

from __future__ import annotations

from tests.emulators.aws.calls import Fault
from tests.emulators.aws.emulator import AwsEmulator
from tests.emulators.aws.guest import FakeGuest, Machine, real_guest

__all__ = ["AwsEmulator", "FakeGuest", "Fault", "Machine", "real_guest"]
