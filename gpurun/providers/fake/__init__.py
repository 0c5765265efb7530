"""The simulated cloud, for tests and the soak; it is in no registry."""

from gpurun.providers.fake.boxes import Box, Fault, Thing
from gpurun.providers.fake.cloud import FakeCloud
from gpurun.providers.fake.profile import PROFILES, Profile

__all__ = ["PROFILES", "Box", "FakeCloud", "Fault", "Profile", "Thing"]
