"""The peak speeds of rented GPUs, for the trainer's MFU and for gpurun's plans. Standard library only."""

from __future__ import annotations

import re

__all__ = ["PEAKS", "peak_tflops"]

PEAKS: dict[str, tuple[str, float]] = {
    "T4": (r"\bT4$", 65.0),
    "V100": (r"\bV100-SXM2", 125.0),
    "Quadro RTX 6000": (r"\bQuadro RTX 6000$", 130.5),
    "A10G": (r"\bA10G$", 70.0),
    "A10": (r"\bA10$", 125.0),
    "L4": (r"\bL4$", 121.0),
    "L40": (r"\bL40$", 181.0),
    "L40S": (r"\bL40S$", 362.0),
    "A40": (r"\bA40$", 149.7),
    "RTX A6000": (r"\bRTX A6000$", 154.8),
    "RTX 6000 Ada": (r"\bRTX 6000 Ada\b", 364.2),
    "RTX 3090": (r"\bRTX 3090$", 71.0),
    "RTX 4090": (r"\bRTX 4090$", 165.0),
    "RTX 5090": (r"\bRTX 5090$", 209.5),
    "A100 PCIe": (r"\bA100\b", 312.0),
    "A100 SXM": (r"\bA100\b", 312.0),
    "H100 PCIe": (r"\bH100 PCIe\b", 756.0),
    "H100 NVL": (r"\bH100 NVL\b", 835.0),
    "H100 SXM": (r"\bH100 80GB HBM3\b", 989.0),
    "GH200": (r"\bGH200\b", 989.0),
    "H200 SXM": (r"\bH200\b(?! NVL)", 989.0),
    "B200": (r"\bB200\b", 2250.0),
    "B300": (r"\bB300\b", 2250.0),
}
"""The speeds of GPUs.

The key is the kind of GPU, as in an offer. The value is a pattern for CUDA's name of the GPU, and its dense bf16 peak
in TFLOP/s from NVIDIA's data sheets; for the first three, which have no bf16, the fp16 peak.
"""
_SHARE_OF_A_CARD = re.compile(r" MIG |-\d+[A-Z](ME)?$")
"""Matches names of partitioned (MIG) or virtual GPUs, whose peak is different or unknown."""


def peak_tflops(cuda_name: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s, by CUDA's name for the GPU; None if it is unknown."""
    if _SHARE_OF_A_CARD.search(cuda_name):
        return None
    return next((peak for pattern, peak in PEAKS.values() if re.search(pattern, cuda_name)), None)
