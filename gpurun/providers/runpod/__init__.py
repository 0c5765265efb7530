"""Rents pods from RunPod over REST v2. Spot bids and the balance exist only in GraphQL, called through RunPod's SDK."""

from __future__ import annotations

from gpurun.providers.runpod.provider import RunPodProvider

__all__ = ["RunPodProvider"]
