"""AWS: EC2 instances through boto3, found by their tags in every region, ended by their own power-off."""

from __future__ import annotations

from gpurun.providers.aws.provider import AwsProvider

__all__ = ["AwsProvider"]
