"""Register the profile of a longer search: `pytest tests/simulation --hypothesis-profile soak`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "soak", max_examples=2000, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
