"""Which cards the driver sees, asked of nvidia-smi: what torch sees may be less."""

from __future__ import annotations

import subprocess

from gpurun.machine.agent.processes import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional

    from gpurun.machine.agent.protocol import Json

FIELDS = ("name", "memory.total", "driver_version")
ECC_FIELD = "ecc.errors.uncorrected.volatile.total"
WAIT_S = 30


def find_gpus() -> List[Json]:
    """One entry a card; none where there is no nvidia-smi, or it does not answer."""
    for fields in ((*FIELDS, ECC_FIELD), FIELDS):  # not every driver knows the last
        command = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
        try:
            told = subprocess.run(
                command, env=environment(), stdin=subprocess.DEVNULL, timeout=WAIT_S,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
            ).stdout  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            continue
        rows = [line.split(",") for line in told.decode("utf-8", "replace").splitlines()]
        return [gpu([word.strip() for word in row]) for row in rows if len(row) == len(fields)]
    return []


def gpu(words: List[str]) -> Json:
    """One row; a figure that the card does not have is None."""
    memory_mib = number(words[1])
    return {
        "name": words[0][:200],
        "memory_bytes": None if memory_mib is None else memory_mib << 20,
        "driver": words[2][:200],
        "ecc_errors": number(words[3]) if len(words) > 3 else None,
    }


def number(word: str) -> Optional[int]:
    """A whole number, where there is one and not `[N/A]`."""
    return int(word) if word.isdecimal() and len(word) < 19 else None
