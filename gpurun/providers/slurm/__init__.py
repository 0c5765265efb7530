"""A Slurm cluster as a provider: an instance is a job, and destroying it frees the job's nodes."""

from __future__ import annotations

from gpurun.providers.slurm.provider import SlurmProvider

__all__ = ["SlurmProvider"]
