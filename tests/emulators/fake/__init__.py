"""The simulated cloud, for tests and the soak; it is in no registry."""

from tests.emulators.fake.boxes import Box, Fault, Thing
from tests.emulators.fake.cloud import FakeCloud
from tests.emulators.fake.profile import PROFILES, Profile

__all__ = ["PROFILES", "Box", "FakeCloud", "Fault", "Profile", "Thing"]
