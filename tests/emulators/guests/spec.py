"""What a guest's owner tells the process that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.emulators.guests.cloud_config import CloudConfig
from tests.emulators.guests.shapes import FakeGpu, Faults

REBOOT, LISTEN = b"r", b"l"
"""What an owner may ask for later: a new life; another sshd, for a guest that cannot be entered from outside."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Spec:
    """One guest, whole."""

    place: str
    """A folder of this machine that is the guest's own: where its disk is mounted, or else the disk itself."""
    whole: bool
    """Whether it is a machine with a root of its own, and not only a group of processes."""
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
    """What every SSH session is given."""
    gpus: Sequence[FakeGpu]
    boot_delay_s: float
    faults: Faults
    sshd: str
    python: str
    """The interpreter that /opt/pytorch/bin/python becomes."""
    python_path: Sequence[str]
    kept: Sequence[str]
    """Folders of this machine that the guest sees, read-only, even where its own files hide them."""
    owner_pid: int

    @property
    def is_container(self) -> bool:
        return bool(self.entrypoint)

    @property
    def root(self) -> Path:
        """The guest's `/`, as its own processes name it."""
        return Path("/") if self.whole else Path(self.place)

    @property
    def base_env(self) -> dict[str, str]:
        """The environment of whatever the guest starts by itself."""
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
            # The dead-man texts write below a machine's /etc and /var: here they are told where that is.
            "GPURUN_GUARD_FOLDER": f"{root}/var/lib/gpurun",
            "GPURUN_GUARD_SSH_FOLDER": f"{root}/etc/ssh",
        }
