"""Rents instances from Lambda Cloud over REST v1, which has no idempotency key, no launch time and no timer."""

from __future__ import annotations

from gpurun.providers.lambdalabs.provider import LambdaProvider, Pace

__all__ = ["LambdaProvider", "Pace"]
