"""The description of a guest that its owner sends to the process that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.emulators.guests.cloud_config import CloudConfig
from tests.emulators.guests.shapes import FakeGpu, Faults

REBOOT, LISTEN = b"r", b"l"
"""Later commands of the owner: reboot; start another sshd in a guest of plain processes."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Spec:
    """Everything that describes one guest."""

    place: str
    """A folder of this computer that only this guest uses: its disk is mounted there, or the folder is its disk."""
    whole: bool
    """Whether it is a machine with its own root, and not only a group of processes."""
    host: str
    port: int
    user: str
    authorized_keys: Sequence[str]
    cloud: CloudConfig | None
    entrypoint: Sequence[str]
    """Empty for a virtual machine."""
    env: Mapping[str, str]
    """The entrypoint's environment."""
    session_env: Mapping[str, str]
    """Variables that every SSH session gets."""
    gpus: Sequence[FakeGpu]
    boot_delay_s: float
    faults: Faults
    sshd: str
    python: str
    """The interpreter that /opt/pytorch/bin/python runs."""
    python_path: Sequence[str]
    kept: Sequence[str]
    """Folders of this computer that the guest sees read-only, even below folders of its own."""
    owner_pid: int

    @property
    def is_container(self) -> bool:
        return bool(self.entrypoint)

    @property
    def root(self) -> Path:
        """Return the guest's `/`, as its own processes name it."""
        return Path("/") if self.whole else Path(self.place)

    @property
    def base_env(self) -> dict[str, str]:
        """Return the environment of every program that the guest itself starts."""
        if self.whole:
            return {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}
        root = self.place
        return {
            "PATH": f"{root}/usr/local/sbin:{root}/usr/bin:{root}/usr/sbin:{PATH}",
            "HOME": f"{root}/home",
            "TMPDIR": f"{root}/tmp",
            "LANG": "C.UTF-8",
            "GUEST_ROOT": root,
            "GUEST_MARK": root,
            # A guard writes to /etc and /var of its machine; these variables lead it into this guest's folder.
            "GPURUN_GUARD_FOLDER": f"{root}/var/lib/gpurun",
            "GPURUN_GUARD_SSH_FOLDER": f"{root}/etc/ssh",
        }
