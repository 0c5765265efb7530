"""Reads pods from RunPod's answers, and writes the body of a create."""

from __future__ import annotations

import base64
import re
import shlex
from datetime import UTC, datetime
from typing import Any

from gpurun.core.machine_token import parse_token
from gpurun.core.records import Address, Instance, InstanceState, Order
from gpurun.providers.base import Rejected, Unknown
from gpurun.providers.runpod.parse import rate

IMAGE = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
"""RunPod's official image, the default. It starts sshd and keeps an existing host key."""
IMAGE_CUDA = "12.8"
"""The CUDA version that the host must support for this image. With an older one, the container never starts."""
START = "/start.sh"
BODY_LIMIT_BYTES = 102_400
DISK_GB = 20

_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_CUDA = re.compile(r"(?<![A-Za-z0-9])cu(?:da)?:?(?:(\d\d)\.(\d+)|(\d\d)(\d))")
_STATES = {
    "PROVISIONING": InstanceState.PENDING,
    "STARTING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "EXITED": InstanceState.STOPPED,
    "ERROR": InstanceState.STOPPED,
    "TERMINATED": InstanceState.GONE,
}


def check_pod_id(identifier: str) -> str:
    """Return the id unchanged; Rejected if it is malformed, because it becomes part of a URL."""
    if not _ID.fullmatch(identifier):
        raise Rejected(f"{identifier!r} is not the id of a pod")
    return identifier


def parse_pod(pod: Any) -> Instance:
    """Return a pod of the account as an instance; Unknown if it has no id, because it could be any pod."""
    if not isinstance(pod, dict) or not isinstance(pod.get("id"), str) or not _ID.fullmatch(pod["id"]):
        raise Unknown("RunPod listed a pod without an id")
    env = _parse_dict(pod.get("env"))
    token = parse_token(_parse_text(env.get("GPURUN_TOKEN")), _parse_text(pod.get("name")))
    gpu, cpu = _parse_dict(pod.get("gpu")), _parse_dict(pod.get("cpu"))
    status = str(pod.get("status") or "")
    count = gpu.get("count")
    return Instance(
        id=pod["id"],
        provider="runpod",
        token=token.text if token else "",
        run=token.run_or(_parse_text(env.get("GPURUN_RUN"))) if token else "",
        state=_STATES.get(status, InstanceState.UNKNOWN),
        address=_parse_address(pod),
        gpu_count=count if isinstance(count, int) else 0,
        rate_micros_per_hour=rate(pod.get("cost")),
        created_wall=_parse_wall(pod.get("createdAt")),
        deadline_wall=token.deadline_or(_parse_text(env.get("GPURUN_DEADLINE"))) if token else None,
        region=str(pod.get("dataCenterId") or ""),
        type_id=str(gpu.get("id") or "") or (f"{cpu.get('id')}-{cpu.get('vcpuCount')}" if cpu else ""),
        said=status,
    )


def make_pod_environment(order: Order, api_url: str) -> dict[str, str]:
    """Return the pod's environment: run, token, deadline, the client's public key and the private host key.

    The host key is made for this run only. The account's key can read it, but that key controls the pod anyway.
    """
    environment = {
        "GPURUN_RUN": order.run,
        "GPURUN_TOKEN": order.token,
        "GPURUN_DEADLINE": str(int(order.deadline_wall)),
        "GPURUN_LEASE_S": str(order.lease_s),
        "GPURUN_API_URL": api_url,
    }
    if order.keys is None:
        return environment
    private = order.keys.host_private.get_secret_value()
    host_key = base64.b64encode(private.encode()).decode()
    return {**environment, "PUBLIC_KEY": order.keys.client_public, "GPURUN_HOST_KEY_B64": host_key}


def make_pod_body(order: Order, api_url: str, guard: str, *, as_args: bool) -> dict[str, Any]:
    """Return the body of a create. With `as_args`, the first program is in the older field."""
    offer = order.offer
    body: dict[str, Any] = {
        "name": order.token,
        "image": order.image or IMAGE,
        "cloud": (offer.tier or "secure").upper(),
        "disk": order.disk_gb or DISK_GB,
        "ports": ["22/tcp"],
        "env": make_pod_environment(order, api_url),
    }
    if offer.gpu_count:
        body["gpu"] = {"id": offer.type_id, "count": offer.gpu_count}
        cuda = cuda_of(body["image"])
        if cuda:
            body["gpu"]["minCudaVersion"] = cuda
    else:
        flavour, vcpus = flavour_of(offer.type_id)
        body["cpu"] = {"id": flavour, "vcpuCount": vcpus}
    if offer.region not in ("", "any"):
        body["dataCenterIds"] = [offer.region]
    if as_args:
        return {**body, "args": arguments_of(guard)}
    return {**body, "entrypoint": ["/bin/sh", "-c", guard], "cmd": [START]}


def cuda_of(image: str) -> str:
    """Return the CUDA version that the host must support, from an image's name (`cu1281`, `cuda12.8.1`); "" if none."""
    found = _CUDA.search(image)
    return f"{found[1] or found[3]}.{found[2] or found[4]}" if found else ""


def arguments_of(guard: str) -> str:
    """Return the command line of the guard and the program that it starts, quoted for a shell."""
    return shlex.join(["/bin/sh", "-c", guard, START])


def flavour_of(type_id: str) -> tuple[str, int]:
    """Return flavour and number of vCPUs: `cpu3c-4` is flavour cpu3c with four vCPUs."""
    flavour, _, vcpus = type_id.rpartition("-")
    if not flavour or not (vcpus.isascii() and vcpus.isdigit()):
        raise Rejected(f"{type_id!r} does not name a CPU flavour and a number of vCPUs, as cpu3c-4 does")
    return flavour, int(vcpus)


def _parse_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _parse_address(pod: dict[str, Any]) -> Address | None:
    """Return the direct address of the pod's sshd; None if it has none.

    RunPod's proxy is not used, because it cannot transfer files and has another host key.
    """
    direct = _parse_dict(_parse_dict(pod.get("ssh")).get("direct"))
    host, port = direct.get("host"), direct.get("port")
    if not isinstance(host, str) or not host or not isinstance(port, int) or not 0 < port < 65536:
        return None
    return Address(kind="ssh", host=host, port=port, user=str(direct.get("username") or "root"))


def _parse_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _parse_wall(value: Any) -> float | None:
    try:
        moment = datetime.fromisoformat(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
