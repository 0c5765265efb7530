"""The simulated cloud for tests and the soak; gpurun's registry of providers does not contain it."""

from tests.emulators.fake.boxes import Box, Fault, Thing
from tests.emulators.fake.cloud import FakeCloud
from tests.emulators.fake.profile import PROFILES, Profile

__all__ = ["PROFILES", "Box", "FakeCloud", "Fault", "Profile", "Thing"]
