"""RunPod: pods over REST v2, and what only its GraphQL has (spot bids, the balance) through its own SDK."""

from __future__ import annotations

from gpurun.providers.runpod.provider import RunPodProvider

__all__ = ["RunPodProvider"]
