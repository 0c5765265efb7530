"""The machine types that the emulated Lambda rents out, with prices and regions; a test can change them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REGIONS = {
    "us-east-1": "Virginia, USA",
    "us-west-1": "California, USA",
    "europe-central-1": "Germany",
}


@dataclass
class Kind:
    """One machine type. `cents` is the hourly price of the whole machine; `card` is the GPU's name in nvidia-smi."""

    name: str
    gpus: int
    gpu: str
    card: str
    memory_mib: int
    cents: int
    vcpus: int
    memory_gib: int
    storage_gib: int
    regions: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "description": f"{self.gpus}x {self.gpu}",
            "gpu_description": self.gpu,
            "price_cents_per_hour": self.cents,
            "specs": {
                "vcpus": self.vcpus, "memory_gib": self.memory_gib, "storage_gib": self.storage_gib, "gpus": self.gpus,
            },
        }  # fmt: skip


def usual_kinds() -> dict[str, Kind]:
    """Return a few machine types. Two are available in one region only, and one in none."""
    everywhere, a100 = list(REGIONS), "NVIDIA A100-SXM4-40GB"
    kinds = [
        Kind("cpu_4x_general", 0, "N/A", "", 0, 20, 4, 16, 512, ["us-east-1"]),
        Kind("gpu_1x_a10", 1, "A10 (24 GB PCIe)", "NVIDIA A10", 23028, 129, 30, 200, 1400, everywhere),
        Kind("gpu_8x_a100", 8, "A100 (40 GB SXM4)", a100, 40960, 1592, 124, 1800, 6144, everywhere),
        Kind("gpu_8x_a100_80gb_sxm4", 8, "A100 (80 GB SXM4)", "NVIDIA A100-SXM4-80GB", 81920, 2232, 240, 1800, 20480,
             ["us-east-1", "us-west-1"]),
        Kind("gpu_8x_h100_sxm5", 8, "H100 (80 GB SXM5)", "NVIDIA H100 80GB HBM3", 81559, 3192, 208, 1800, 24780, []),
        Kind("gpu_1x_gh200", 1, "GH200 (96 GB)", "NVIDIA GH200 480GB", 97871, 229, 64, 432, 4096, ["us-east-1"]),
        Kind("gpu_1x_tomorrow", 1, "T9 (1 TB)", "NVIDIA T9", 1 << 20, 1, 8, 64, 512, everywhere),
    ]  # fmt: skip
    return {kind.name: kind for kind in kinds}


def region_json(name: str) -> dict[str, Any]:
    return {"name": name, "description": REGIONS[name]}
