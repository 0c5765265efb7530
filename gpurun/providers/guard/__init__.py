"""The dead-man programs: a machine gets one so that it ends itself at its deadline, even if all else is lost.

Programs for any POSIX shell, in the files beside this one: `deadline.sh` knows when the time is over, `request.sh`
speaks HTTP, and each cloud has one that ends its machine. All of them go with the create.
"""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpurun.core.records import RunKeys
from gpurun.core.secrets import Secret


def runpod_wrapper() -> str:
    """Return a pod's first program, for `/bin/sh -c`: arms its end, installs its host key, then becomes "$0" "$@".

    Its environment has the deadline (GPURUN_DEADLINE, GPURUN_LEASE_S), the API (GPURUN_API_URL) and the host key
    (GPURUN_HOST_KEY_B64); RunPod adds the pod's id and the key that ends only this pod.
    """
    return _text("deadline", "request", "runpod")


def aws_user_data(*, deadline_wall: float, lease_s: int, keys: RunKeys) -> str:
    """Return a cloud-config that powers the machine off at its deadline, at every boot again, and gives it its keys."""
    calendar = datetime.fromtimestamp(int(deadline_wall), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    head = _variables(DEADLINE=str(int(deadline_wall)), LEASE_S=str(lease_s), CALENDAR=calendar)
    return _cloud_config(
        **_host_key(keys),
        ssh_authorized_keys=[keys.client_public.strip()],
        ssh_pwauth=False,
        bootcmd=[["sh", "-c", head + _text("deadline", "aws")]],
    )


def lambda_user_data(*, keys: RunKeys, guard: str = "") -> str:
    """Return a cloud-config with the machine's host key and, run at every boot, its guard (`lambda_guard`), if any."""
    return _cloud_config(**_host_key(keys), **({"bootcmd": [guard]} if guard else {}))


def lambda_guard(*, key: Secret, base_url: str, token: str, deadline_wall: float, lease_s: int) -> str:
    """Return the program that ends everything with the token. An account's key is in it: it is as secret as that key.

    As text among the commands of the boot it becomes part of a file of root's; in a list it would be an argument. The
    key is in base64, one run of letters that needs no quoting and is left out wherever an answer repeats it.
    """
    head = _variables(
        BASE_URL=base_url,
        TOKEN=token,
        DEADLINE=str(int(deadline_wall)),
        LEASE_S=str(lease_s),
        KEY_B64=b64encode(key.reveal().encode()).decode(),
    )
    return head + _text("deadline", "request", "lambda")


def _text(*names: str) -> str:
    """Return the programs, one after the other."""
    return "\n".join(Path(__file__).with_name(f"{name}.sh").read_text(encoding="utf-8") for name in names)


def _variables(**values: str) -> str:
    """Return assignments for the top of a program."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _host_key(keys: RunKeys) -> dict[str, Any]:
    """Return the run's host key in place of all others, so that a client knows the machine before its first boot."""
    private = keys.host_private.get_secret_value()
    return {
        "ssh_deletekeys": True,
        "ssh_genkeytypes": ["ed25519"],
        "ssh_keys": {"ed25519_private": private, "ed25519_public": keys.host_public.strip()},
    }


def _cloud_config(**settings: Any) -> str:
    """Return settings as cloud-init reads them: JSON is YAML, and has no quoting to get wrong."""
    return "#cloud-config\n" + json.dumps(settings, indent=1) + "\n"
