"""RunPod: pods over REST v2; spot bids and the balance, which only its GraphQL has, through its own SDK."""

from __future__ import annotations

from gpurun.providers.runpod.provider import RunPodProvider

__all__ = ["RunPodProvider"]
