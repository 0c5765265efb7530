"""Measures how fast several machines reach one another, by an all-reduce among all processes that torchrun started.

    torchrun --nproc-per-node=8 --nnodes=2 --node-rank=0 --master-addr=10.0.0.1 trainer/network.py

The other machine runs the same command with --node-rank=1. The first process prints one line of JSON: each node with
its GPUs, and `gigabytes_per_s`, the data that each process moved per second (nccl-tests' "busbw"), as a step moves its
gradients. If a node has fewer GPUs than processes, nothing is measured, and the value is null. The file needs only
torch, and nothing else of the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

__all__ = ["main"]

ANSWER_S = 120.0
"""How many seconds the first node waits for the last one."""
CARD_BYTES, CPU_BYTES = 256 << 20, 1 << 20
WARM_UP = 3


def _seen() -> dict[str, Any]:
    """Return the hardware of this process's node."""
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    devices = [{"name": card.name, "memory_bytes": card.total_memory} for card in cards]
    return {"name": os.environ.get("SLURMD_NODENAME") or socket.gethostname(), "devices": devices}


def _measured(device: torch.device, processes: int, seconds: float) -> tuple[float, float]:
    """Return the bytes per second that each process moves, and how many seconds the measurement took."""
    size = CARD_BYTES if device.type == "cuda" else CPU_BYTES
    data = torch.zeros(size // 4, device=device)

    def took(rounds: int) -> float:
        """Return the seconds for `rounds` rounds, in the slowest process."""
        began_s = time.monotonic()
        for _ in range(rounds):
            dist.all_reduce(data)
        if device.type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor(time.monotonic() - began_s, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.item())

    took(WARM_UP)
    rounds = max(1, int(seconds * WARM_UP / max(1e-6, took(WARM_UP))))
    took_s = took(rounds)
    return rounds * size * 2 * (processes - 1) / processes / took_s, took_s


def main() -> int:
    """Run the command and return its exit code; raise an error if some processes did not arrive in time."""
    parser = argparse.ArgumentParser(
        prog="trainer/network.py", description="Measure how fast machines reach each other."
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure")
    seconds = parser.parse_args().seconds
    rank, local_rank, count = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun's first node serves this store. Each process writes its hardware there, which decides the backend.
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))
    store.set(f"seen/{rank}", json.dumps([local_rank, _seen()]))
    reports = [json.loads(store.get(f"seen/{other}")) for other in range(count)]
    nodes = [node for local, node in reports if local == 0]
    has_cards = any(node["devices"] for node in nodes)
    backend = "nccl" if has_cards else "gloo"
    rate, took_s = None, 0.0
    if not has_cards or all(local < len(node["devices"]) for local, node in reports):
        device = torch.device("cuda", local_rank) if has_cards else torch.device("cpu")
        if has_cards:
            torch.cuda.set_device(device)
        group = PrefixStore("network", store)
        dist.init_process_group(backend, store=group, rank=rank, world_size=count, timeout=timedelta(seconds=ANSWER_S))
        rate, took_s = _measured(device, count, seconds)
        dist.destroy_process_group()
    if rank == 0:
        gigabytes = None if rate is None else round(rate / 1e9, 3)
        answer = {"nodes": nodes, "backend": backend, "seconds": round(took_s, 3), "gigabytes_per_s": gigabytes}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
