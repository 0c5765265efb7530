"""What the cards do, as nvidia-smi tells it every few seconds; nothing where there is none."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time

from gpurun.remote.agent.processes import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional, Sequence

    from gpurun.remote.agent.system import Json

EVERY_S, TALK_S, STALE_S = 5.0, 10.0, 30.0
MOST_CARDS = 64
FIELDS = {
    "use_percent": "utilization.gpu",
    "memory_mib": "memory.used",
    "memory_of_mib": "memory.total",
    "celsius": "temperature.gpu",
    "watts": "power.draw",
}


class GpuUse:
    """Asks in a thread of its own: a card that fell off the bus may hold nvidia-smi, and must not hold the keeper."""

    def __init__(self) -> None:
        self.seen: List[Json] = []
        self.seen_s = 0.0
        if shutil.which("nvidia-smi", path=environment().get("PATH")):
            threading.Thread(target=self.ask, daemon=True).start()

    def now(self) -> List[Json]:
        """The last figures of each card, unless they are old."""
        return self.seen if time.monotonic() - self.seen_s < STALE_S else []

    def ask(self) -> None:
        """Ask for ever."""
        while True:
            self.seen, self.seen_s = ask_once(), time.monotonic()
            time.sleep(EVERY_S)


def ask_once() -> List[Json]:
    """One entry a card; a figure that the card does not have is None."""
    rows = query(list(FIELDS.values()), TALK_S) or []
    return [{name: figure(row[place]) for place, name in enumerate(FIELDS)} for row in rows[:MOST_CARDS]]


def query(fields: Sequence[str], limit_s: float) -> Optional[List[List[str]]]:
    """These fields of each card, as nvidia-smi has them; None where there is none, or it does not answer."""
    command = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(
            command, env=environment(), stdin=subprocess.DEVNULL, timeout=limit_s,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[word.strip() for word in line.split(",")] for line in told.decode("utf-8", "replace").splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def figure(word: str) -> Optional[int]:
    """A whole number of `94`, `607.53`; None of `[N/A]`."""
    try:
        value = float(word)
    except ValueError:
        return None
    return int(value) if 0 <= value < 1e9 else None
