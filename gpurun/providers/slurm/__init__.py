"""A cluster with Slurm: an instance is a job on one node, and ending it frees the node."""

from __future__ import annotations

from gpurun.providers.slurm.provider import SlurmProvider

__all__ = ["SlurmProvider"]
