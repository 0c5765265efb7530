"""The GPUs and CPUs that the emulated RunPod rents out, with prices and stock; a test can change them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

DATA_CENTERS = {"US-KS-2": "US Kansas 2", "EU-RO-1": "EU Romania 1"}


def single(amount: Decimal) -> float:
    """Return an amount as RunPod sends it: in single precision, because its document says `format: float`."""
    return float(struct.unpack("f", struct.pack("f", amount))[0])


@dataclass
class GpuKind:
    """One kind of GPU. Prices are dollars per GPU-hour; the stock in each cloud is NONE, LOW, MEDIUM or HIGH."""

    id: str
    name: str
    memory: int
    price: dict[str, Decimal]
    bid: dict[str, Decimal]
    most: dict[str, int] = field(default_factory=lambda: {"secure": 8, "community": 8})
    stock: dict[str, str] = field(default_factory=lambda: {"secure": "HIGH", "community": "LOW"})
    centers: set[str] = field(default_factory=lambda: set(DATA_CENTERS))

    def as_json(self, cloud: str, count: int, *, with_stock: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": self.id, "name": self.name, "pool": None, "manufacturer": "NVIDIA", "memory": self.memory,
            "secure": self.price["secure"] > 0, "community": self.price["community"] > 0,
            "price": {name: single(price) for name, price in self.price.items()}, "maxCount": dict(self.most),
        }  # fmt: skip
        if with_stock:
            fields["availability"] = self.level(cloud, count)
            if fields["availability"] != "NONE":
                fields["dataCenters"] = [
                    {"id": key, "name": name, "availability": fields["availability"]}
                    for key, name in DATA_CENTERS.items()
                    if key in self.centers
                ]
        return fields

    def level(self, cloud: str, count: int) -> str:
        return self.stock[cloud] if self.price[cloud] and count <= self.most[cloud] else "NONE"


@dataclass
class CpuKind:
    """One CPU flavour. The price is dollars per vCPU-hour."""

    id: str
    name: str
    price: Decimal
    most: int = 32
    stock: str = "HIGH"

    def as_json(self, *, with_stock: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": self.id, "name": self.name, "group": "Gen 3", "vcpu": {"min": 2, "max": self.most},
            "ramGbPerVcpu": 2, "price": {"securePerVcpu": single(self.price), "serverlessPerVcpu": single(self.price)},
        }  # fmt: skip
        return fields | ({"availability": self.stock} if with_stock else {})


def _gpu(kind: str, name: str, memory: int, secure: str, community: str, bid: str) -> GpuKind:
    price = {"secure": Decimal(secure), "community": Decimal(community)}
    return GpuKind(kind, name, memory, price, {cloud: Decimal(bid) for cloud in price})


def usual_gpus() -> dict[str, GpuKind]:
    """Return the kinds that tests rent, at the prices of November 2026."""
    kinds = [
        _gpu("NVIDIA GeForce RTX 4090", "RTX 4090", 24, "0.69", "0.34", "0.20"),
        _gpu("NVIDIA A40", "A40", 48, "0.44", "0", "0.20"),
        _gpu("NVIDIA A100 80GB PCIe", "A100 PCIe", 80, "1.79", "1.19", "0.60"),
        _gpu("NVIDIA A100-SXM4-80GB", "A100 SXM", 80, "1.79", "1.39", "0.79"),
        _gpu("NVIDIA H100 80GB HBM3", "H100 SXM", 80, "3.99", "2.69", "1.75"),
    ]
    return {kind.id: kind for kind in kinds}


def data_centers() -> list[dict[str, Any]]:
    return [
        {"id": key, "name": name, "region": "NORTH_AMERICA" if key.startswith("US") else "EUROPE",
         "globalNetwork": True, "networkVolumeTypes": ["STANDARD"], "compliance": []}
        for key, name in DATA_CENTERS.items()
    ]  # fmt: skip


def usual_cpus() -> dict[str, CpuKind]:
    kinds = [CpuKind("cpu3c", "Compute-Optimized", Decimal("0.03")), CpuKind("cpu5c", "Compute", Decimal("0.035"))]
    return {kind.id: kind for kind in kinds}
