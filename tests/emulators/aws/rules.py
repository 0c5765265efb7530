"""The resources and the permissions of the account: regions, images, prices, quotas, capacity. A test changes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from gpurun.providers.catalog import all_offers
from tests.emulators.aws.calls import AwsError, Call

_DLAMI = "/aws/service/deeplearning/ami/x86_64/"
_SERVICE_OF = {"email": "ses"}
_BAD_KEY = {"ec2": ("AuthFailure", 401), "sts": ("InvalidClientTokenId", 403), "iam": ("InvalidClientTokenId", 403)}
_DENIED = {"ec2": "UnauthorizedOperation", "sts": "AccessDenied", "iam": "AccessDenied"}


@dataclass
class Rules:
    """The settings of an account.

    `denied` holds IAM actions, such as `ec2:RunInstances`, or `ec2:RunInstances@us-west-2` for one region.
    `sold_out` holds machine types, such as `p4d.24xlarge`, or `p4d.24xlarge@us-east-1a` for one zone. `quotas` maps
    each quota code to the vCPUs that it allows.
    """

    regions: list[str] = field(default_factory=lambda: ["us-east-1", "us-west-2", "eu-west-1"])
    denied: set[str] = field(default_factory=set)
    sold_out: set[str] = field(default_factory=set)
    quotas: dict[str, int] = field(default_factory=lambda: dict.fromkeys(
        ("L-417A185B", "L-DB2E81BA", "L-1216C47A", "L-3819A6DF", "L-7212CCBC", "L-C4BD4855", "L-34B43A08"), 1_000
    ))  # fmt: skip
    valid_key: bool = True
    strangers: dict[str, str] = field(default_factory=dict)
    """The account of each other key that AWS knows; such a key can only request its own identity."""
    image_gb: int = 45
    image_platform: str = "Linux/UNIX"
    image_product: str = ""
    image_more_gb: list[int] = field(default_factory=list)
    """The sizes of the further disks of every image."""
    images: list[str] = field(
        default_factory=lambda: [
            "oss-nvidia-driver-gpu-pytorch-2.7-ubuntu-22.04",
            "oss-nvidia-driver-gpu-pytorch-2.9-ubuntu-24.04",
            "oss-nvidia-driver-gpu-pytorch-2.10-ubuntu-22.04",
            "oss-nvidia-driver-gpu-pytorch-2.10-ubuntu-24.04",
            "oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04",
            "base-oss-nvidia-driver-gpu-ubuntu-24.04",
            *(f"neuron-pytorch-2.{n}-ubuntu-22.04" for n in range(8)),
        ]
    )
    prices_usd: dict[str, str] = field(default_factory=dict)
    """By machine type, or by type and region; all other prices are the catalogue's."""
    spot_usd: dict[str, str] = field(default_factory=dict)
    """By type and zone, `p4d.24xlarge@us-east-1a`; all other spot prices are a third of the on-demand price."""
    not_sold: set[str] = field(default_factory=set)
    no_default_vpc: bool = False

    def check(self, call: Call, key: str) -> None:
        """Raise AwsError for a call with a wrong key, or one that IAM denies."""
        if call.key in self.strangers and call.action == "GetCallerIdentity":
            return
        if not self.valid_key or call.key != key:
            code, status = _BAD_KEY.get(call.service, ("UnrecognizedClientException", 400))
            raise AwsError(code, "AWS was not able to validate the provided access credentials", status)
        action = f"{_SERVICE_OF.get(call.service, call.service)}:{call.action}"
        if action in self.denied or f"{action}@{call.region}" in self.denied:
            words = f"You are not authorized to perform this operation. User may not {action}. "
            encoded = "Encoded authorization failure message: " + "x" * 400 if call.service == "ec2" else ""
            raise AwsError(_DENIED.get(call.service, "AccessDeniedException"), words + encoded, 403)

    def image_of(self, name: str, region: str) -> str:
        """Return the id of the image with this name in a region."""
        return "ami-" + hashlib.sha256(f"{name} {region}".encode()).hexdigest()[:17]

    def parameters(self, region: str) -> dict[str, str]:
        """Return the public parameters by which AWS publishes the ids of its images."""
        return {f"{_DLAMI}{name}/latest/ami-id": self.image_of(name, region) for name in sorted(self.images)}

    def knows_image(self, identifier: str, region: str) -> bool:
        return identifier in self.parameters(region).values()

    def usd(self, type_id: str, region: str) -> str | None:
        """Return the on-demand price per hour; None if the type is not sold in the region."""
        if {type_id, f"{type_id}@{region}"} & self.not_sold:
            return None
        named = self.prices_usd.get(f"{type_id}@{region}") or self.prices_usd.get(type_id)
        rows = [row.rate_micros_per_hour for row in all_offers() if (row.provider, row.type_id) == ("aws", type_id)]
        return named or (f"{rows[0] / 1e6:.10f}" if rows else None)

    def spot(self, type_id: str, zone: str) -> str | None:
        """Return the spot price per hour in a zone; None if the type is not sold there."""
        price = self.usd(type_id, zone[:-1])
        return self.spot_usd.get(f"{type_id}@{zone}") or (f"{float(price) / 3:.6f}" if price else None)

    def has_capacity(self, type_id: str, zone: str) -> bool:
        return not {type_id, f"{type_id}@{zone}"} & self.sold_out
