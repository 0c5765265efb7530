"""Made-up facts as a machine reports them."""

from __future__ import annotations

from typing import Any

from gpurun.remote.machine_facts import CardFacts, Gpu, MachineFacts, Torch

A100, GIB = "NVIDIA A100-SXM4-80GB", 1 << 30


def facts(
    name: str = A100,
    count: int = 8,
    gib: float = 79.25,
    *,
    cards: int | None = None,
    ecc: int | None = 0,
    **torch: Any,
) -> MachineFacts:
    """Return the facts of a healthy machine, except where an argument says otherwise."""
    devices = tuple(Gpu(name=name, memory_bytes=int(gib * GIB)) for _ in range(count))
    known = {"found": True, "python": "/py", "version": "2.8.0+cu128", "numpy": "2.1", "cuda": "12.8"}
    return MachineFacts(
        v=1,
        python="3.12",
        platform="Linux",
        cpus=8,
        memory_bytes=1 << 36,
        disk_free_bytes=1 << 40,
        codecs=("zstd", "gzip"),
        wall=1.0,
        boot_id="b",
        shipped_sha256=None,
        gpus=tuple(
            CardFacts(name=name, memory_bytes=80 * GIB, driver="570.1", ecc_errors=ecc)
            for _ in range(count if cards is None else cards)
        ),
        torch=Torch(**(known | {"devices": devices} | torch)),
    )
