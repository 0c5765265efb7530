"""Chooses the machine image: the one that the user named, or the newest Deep Learning AMI that suits the trainer.

A machine without a GPU boots the same image, because torch is in the same place; the GPU driver is harmless there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.providers.aws.wire import AwsClients, AwsReply
from gpurun.providers.base import Rejected

PARAMETERS = "/aws/service/deeplearning/ami/x86_64/"
USER = "ubuntu"
LEAST_TORCH = (2, 8)
SYSTEMS = ("24.04", "22.04")
WITHOUT_DRIVER = ("p2.", "p3.")
"""Prefixes of machine types with GPUs that the image's open kernel module does not support."""

_NAME = re.compile(
    re.escape(PARAMETERS) + r"oss-nvidia-driver-gpu-pytorch-(\d+)\.(\d+)-ubuntu-(\d\d\.\d\d)/latest/ami-id"
)
_LINUX = "Linux/UNIX"
_ID = re.compile(r"ami-[0-9a-f]{8,32}")


@dataclass(frozen=True)
class Image:
    """An image in one region. `least_gb` is the size of its root disk, so the machine's disk cannot be smaller."""

    id: str
    root_device: str
    least_gb: int


def choose_image(wire: AwsClients, region: str, named: str) -> Image:
    """Return the named image, or the newest suitable one if `named` is empty.

    Rejected if the region does not have it, or if the named image is not an AMI or costs extra. AWS's own images are
    free.
    """
    if named and not _ID.fullmatch(named):
        raise Rejected(f"{named!r} is not the id of an AMI (--image ami-0123456789abcdef0)")
    identifier = named or _find_newest_image(wire, region)
    found = list(wire.pages("ec2", region, "describe_images", "Images", ImageIds=[identifier]))
    if not found:
        raise Rejected(f"there is no image {identifier} in {region}")
    root = str(found[0].get("RootDeviceName") or "/dev/sda1")
    disks = {disk.get("DeviceName"): disk["Ebs"] for disk in found[0].get("BlockDeviceMappings") or () if "Ebs" in disk}
    first = disks.pop(root, {})
    extra_cost = _describe_extra_cost(found[0], list(disks)) if named else ""
    if extra_cost:
        what = f"the image {identifier} costs extra, which neither plan nor cap includes: {extra_cost}"
        raise Rejected(f"{what}; choose another one with --image")
    return Image(identifier, root, int(first.get("VolumeSize") or 0))


def _describe_extra_cost(image: AwsReply, more_disks: Sequence[object]) -> str:
    """Return the reason why an image costs more than Linux on one disk; "" if it does not."""
    system = str(image.get("PlatformDetails") or _LINUX)
    if system != _LINUX:
        return f"its system is {system}"
    if image.get("ProductCodes"):
        return "it is sold in AWS Marketplace, at a price that EC2 does not report"
    return f"it has more disks: {', '.join(map(str, more_disks))}" if more_disks else ""


def _find_newest_image(wire: AwsClients, region: str) -> str:
    """Return the id of AWS's image with the newest PyTorch and suitable Ubuntu; Rejected if there is none."""
    best: tuple[tuple[int, int], str] | None = None
    chosen = ""
    for parameter in wire.pages("ssm", region, "get_parameters_by_path", "Parameters", Path=PARAMETERS, Recursive=True):
        name = _NAME.fullmatch(str(parameter.get("Name")))
        if name is None or name[3] not in SYSTEMS:
            continue
        rank = ((int(name[1]), int(name[2])), name[3])
        if rank[0] >= LEAST_TORCH and (best is None or rank > best):
            best, chosen = rank, str(parameter.get("Value"))
    if not _ID.fullmatch(chosen):
        oldest = ".".join(map(str, LEAST_TORCH))
        raise Rejected(f"{region} lists no Deep Learning AMI with PyTorch {oldest} or newer; name one: --image ami-…")
    return chosen
