"""Builds the guard: a program that ends a machine at its deadline, even if every other part of gpurun is lost.

The guard consists of the POSIX shell scripts in this folder. `deadline.sh` decides when the time is over, `request.sh`
sends HTTP requests, and each cloud has a script that ends its machine. They are part of the request that creates the
machine.
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
    """Return a pod's first program, for `/bin/sh -c`. It starts the timer, installs the host key and runs "$0" "$@".

    It reads the deadline (GPURUN_DEADLINE, GPURUN_LEASE_S), the API's address (GPURUN_API_URL) and the host key
    (GPURUN_HOST_KEY_B64) from its environment. RunPod adds the pod's id and a key that can terminate only this pod.
    """
    return _read_scripts("deadline", "request", "runpod")


def aws_user_data(*, deadline_wall: float, lease_s: int, keys: RunKeys) -> str:
    """Return a cloud-config that installs the run's keys and, at every boot, arms a power-off at the deadline."""
    calendar = datetime.fromtimestamp(int(deadline_wall), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    head = _format_variables(DEADLINE=str(int(deadline_wall)), LEASE_S=str(lease_s), CALENDAR=calendar)
    return _format_cloud_config(
        **_build_host_key_settings(keys),
        ssh_authorized_keys=[keys.client_public.strip()],
        ssh_pwauth=False,
        bootcmd=[["sh", "-c", head + _read_scripts("deadline", "aws")]],
    )


def lambda_user_data(*, keys: RunKeys, guard: str = "") -> str:
    """Return a cloud-config that installs the host key and, at every boot, runs the guard of `lambda_guard`."""
    return _format_cloud_config(**_build_host_key_settings(keys), **({"bootcmd": [guard]} if guard else {}))


def lambda_guard(*, key: Secret, base_url: str, token: str, deadline_wall: float, lease_s: int) -> str:
    """Return the program that terminates every machine with the token. It contains an API key, so keep it secret.

    It must be a string in `bootcmd`: cloud-init writes strings into a file that only root can read, but would pass a
    list as arguments, which every user can see. In base64, the key needs no quoting and is masked in answers.
    """
    head = _format_variables(
        BASE_URL=base_url,
        TOKEN=token,
        DEADLINE=str(int(deadline_wall)),
        LEASE_S=str(lease_s),
        KEY_B64=b64encode(key.reveal().encode()).decode(),
    )
    return head + _read_scripts("deadline", "request", "lambda")


def _read_scripts(*names: str) -> str:
    """Return the contents of these scripts, joined in this order."""
    return "\n".join(Path(__file__).with_name(f"{name}.sh").read_text(encoding="utf-8") for name in names)


def _format_variables(**values: str) -> str:
    """Return shell assignments for the top of a script."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _build_host_key_settings(keys: RunKeys) -> dict[str, Any]:
    """Return settings that make the run's host key the only one, so the client knows the key before the first boot."""
    private = keys.host_private.get_secret_value()
    return {
        "ssh_deletekeys": True,
        "ssh_genkeytypes": ["ed25519"],
        "ssh_keys": {"ed25519_private": private, "ed25519_public": keys.host_public.strip()},
    }


def _format_cloud_config(**settings: Any) -> str:
    """Return the settings as a cloud-config. JSON is valid YAML, and is always quoted correctly."""
    return "#cloud-config\n" + json.dumps(settings, indent=1) + "\n"
