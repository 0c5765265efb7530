"""What a guest is made of: its GPUs as nvidia-smi shows them, and what is to go wrong with it."""

from __future__ import annotations

from dataclasses import dataclass


class GuestFailed(Exception):
    """A guest could not be booted, or did not become ready; the message ends with its console."""


@dataclass(frozen=True)
class FakeGpu:
    """One line of the guest's nvidia-smi. Memory in MiB as nvidia-smi tells it: an A100 80GB says 81920."""

    name: str = "NVIDIA A100-SXM4-80GB"
    memory_mib: int = 81920
    driver_version: str = "570.195.03"
    uncorrected_ecc: int = 0


@dataclass(frozen=True)
class Faults:
    """What is wrong with a guest from its first boot on."""

    sshd_delay_s: float = 0.0
    """The address is up so long before sshd listens: a connection is refused."""
    wrong_host_key: bool = False
    """The guest shows a host key of its own, whatever it was given."""
    python3_missing: bool = False
    """No python3 on the PATH (nor /opt/pytorch)."""
    zstd_missing: bool = False
    """No zstd program on the PATH."""
    disk_mb: int = 0
    """The whole disk of the guest, in MB, for what it writes itself; 0 for plenty."""
