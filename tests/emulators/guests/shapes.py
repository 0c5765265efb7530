"""The GPUs of a guest, as nvidia-smi shows them, and the faults of a guest."""

from __future__ import annotations

from dataclasses import dataclass


class GuestFailed(Exception):
    """The error of a guest that cannot be booted, does not become ready or does not end."""


@dataclass(frozen=True)
class FakeGpu:
    """One GPU in the guest's nvidia-smi. Memory is in MiB as nvidia-smi prints it: an A100 80GB has 81920."""

    name: str = "NVIDIA A100-SXM4-80GB"
    memory_mib: int = 81920
    driver_version: str = "570.195.03"
    uncorrected_ecc: int = 0


@dataclass(frozen=True)
class Faults:
    """The faults that a guest has from its first boot on."""

    sshd_delay_s: float = 0.0
    """How long sshd does not listen after the boot, so that a connection is refused."""
    wrong_host_key: bool = False
    """The guest shows a random host key, whatever key it was given."""
    python3_missing: bool = False
    """No python3 on the PATH (nor /opt/pytorch)."""
    zstd_missing: bool = False
    """No zstd program on the PATH."""
    disk_mb: int = 0
    """The size in MB of the disk for the guest's own writes; 0 sets no limit."""
