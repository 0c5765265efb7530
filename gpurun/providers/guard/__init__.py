"""The dead-man texts: what a machine is given so that it ends itself at its deadline, whoever else is lost.

Programs for any POSIX shell, in the files beside this one: `deadline.sh` knows when the time is over, `request.sh`
speaks HTTP, and each cloud has one that ends its machine. They go with the create, or are handed over as a `base.Hand`.
"""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpurun.core.model import RunKeys


def runpod_wrapper() -> str:
    """A pod's first program, for `/bin/sh -c`: arms its end, installs its host key, then becomes "$0" "$@".

    Its environment names the deadline (GPURUN_DEADLINE, GPURUN_LEASE_S), the API (GPURUN_API_URL) and the host key
    (GPURUN_HOST_KEY_B64); RunPod adds the pod's id and the key that ends only this pod.
    """
    return _text("deadline", "request", "runpod")


def aws_user_data(*, deadline_wall: float, lease_s: int, keys: RunKeys) -> str:
    """Cloud-config that powers the machine off at its deadline, at every boot anew, and gives it its keys."""
    calendar = datetime.fromtimestamp(int(deadline_wall), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    told = _told(DEADLINE=str(int(deadline_wall)), LEASE_S=str(lease_s), CALENDAR=calendar)
    return _cloud_config(
        **_host_key(keys),
        ssh_authorized_keys=[keys.client_public.strip()],
        ssh_pwauth=False,
        bootcmd=[["sh", "-c", told + _text("deadline", "aws")]],
    )


def lambda_user_data(*, keys: RunKeys) -> str:
    """Cloud-config that gives the machine its host key, and holds no other secret.

    A reboot ends every program: what was handed over (`lambda_hand`) is started again from where the agent keeps it.
    """
    return _cloud_config(**_host_key(keys), bootcmd=[["sh", "-c", _text("rearm")]])


def lambda_hand(*, base_url: str, instance_id: str, deadline_wall: float, lease_s: int) -> bytes:
    """The script of a `base.Hand`: ends the machine by the account key in `guard.key` beside it.

    It goes on trying until the machine is gone, and ends by itself once that key is taken away.
    """
    told = _told(BASE_URL=base_url, INSTANCE=instance_id, DEADLINE=str(int(deadline_wall)), LEASE_S=str(lease_s))
    return (told + _text("deadline", "request", "lambda")).encode()


def _text(*names: str) -> str:
    """The programs, one after the other."""
    return "\n".join(Path(__file__).with_name(f"{name}.sh").read_text(encoding="utf-8") for name in names)


def _told(**values: str) -> str:
    """Assignments for the top of a program."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _host_key(keys: RunKeys) -> dict[str, Any]:
    """The run's host key in place of all others, so that whoever logs in knows the machine before its first boot."""
    private = keys.host_private.get_secret_value()
    return {
        "ssh_deletekeys": True,
        "ssh_genkeytypes": ["ed25519"],
        "ssh_keys": {"ed25519_private": private, "ed25519_public": keys.host_public.strip()},
    }


def _cloud_config(**settings: Any) -> str:
    """Settings as cloud-init reads them: JSON is YAML, and has no quoting to get wrong."""
    return "#cloud-config\n" + json.dumps(settings, indent=1) + "\n"
