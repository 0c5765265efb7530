"""Rents EC2 instances through boto3. Tags identify them in every region; at the deadline they power themselves off."""

from __future__ import annotations

from gpurun.providers.aws.provider import AwsProvider

__all__ = ["AwsProvider"]
