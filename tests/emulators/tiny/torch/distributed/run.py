"""A stand-in for torchrun: it starts the processes of one node and gives each its RANK and LOCAL_RANK.

It does not run trainer/network.py, which needs torch: the nodes meet in a folder, and the first prints the result.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    many, *command = sys.argv[1:]
    node, nodes, count = int(os.environ["PET_NODE_RANK"]), int(os.environ["PET_NNODES"]), int(many.partition("=")[2])
    assert int(os.environ["PET_MASTER_PORT"])
    if command[0] == "network.py":
        return meet(node, nodes)
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "RANK": str(node * count + local), "LOCAL_RANK": str(local)},
        )
        for local in range(count)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def meet(node: int, nodes: int) -> int:
    os.makedirs("met", exist_ok=True)
    Path(f"met/{os.environ['SLURMD_NODENAME']}").touch()
    end = time.monotonic() + 10
    while len(os.listdir("met")) < nodes:
        if time.monotonic() > end:
            print("not all came", file=sys.stderr)
            return 1
        time.sleep(0.01)
    if node == 0:
        seen = [{"name": name, "devices": []} for name in sorted(os.listdir("met"))]
        print(json.dumps({"nodes": seen, "backend": "gloo", "seconds": 1.0, "gigabytes_per_s": 0.5}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
