"""What the GPUs do, read from nvidia-smi every few seconds, and whether the job uses them."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time

from gpurun.remote.agent.processes import environment, trainers
from gpurun.remote.agent.system import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional, Sequence, Tuple

    from gpurun.remote.agent.system import Json

EVERY_S, TALK_S, STALE_S, SELDOM_S = 5.0, 10.0, 30.0, 3600.0
MOST_CARDS, LAST_LINES, MOST_WORDS = 64, 3, 400
SILENT = "did not answer"
FIELDS = {
    "use_percent": "utilization.gpu",
    "memory_mib": "memory.used",
    "memory_of_mib": "memory.total",
    "celsius": "temperature.gpu",
    "watts": "power.draw",
}


class GpuWatcher:
    """Runs nvidia-smi in a separate thread, because a failed GPU may make it hang, and it must not block the keeper."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.seen: List[Json] = []
        self.tally = {"looks": 0, "busy": 0, "own": 0, "most_mib": 0}
        self.seen_s = 0.0
        if shutil.which("nvidia-smi", path=environment().get("PATH")):
            threading.Thread(target=self.ask, daemon=True).start()

    def now(self) -> List[Json]:
        """Return the last figures of each GPU; [] if they are too old."""
        return self.seen if time.monotonic() - self.seen_s < STALE_S else []

    def ask(self) -> None:
        """Run nvidia-smi forever; less and less often if it does not answer, because each call may leave a process."""
        wait_s, last = EVERY_S, ""
        while True:
            (self.seen, words), self.seen_s = ask_once(), time.monotonic()
            if words and words != last:
                say("nvidia-smi says: %s" % words)
            last, wait_s = words, min(2 * wait_s, SELDOM_S) if SILENT in words else EVERY_S
            self.count()
            time.sleep(wait_s)

    def count(self) -> None:
        """Add this sample to the tally: whether a GPU was busy, and whether a process of the job used one."""
        if not self.seen:
            return
        holders = {figure(row[0]) for row in query("compute-apps", ["pid"], TALK_S) or []}
        before, cards = self.tally, self.seen
        self.tally = {  # The tally is replaced as a whole, because another thread reads it.
            "looks": before["looks"] + 1,
            "busy": before["busy"] + any(card["use_percent"] for card in cards),
            "own": before["own"] + bool(holders & trainers(self.root)),
            "most_mib": max(before["most_mib"], *(card["memory_mib"] or 0 for card in cards)),
        }


def ask_once() -> Tuple[List[Json], str]:
    """Return one entry per GPU, and nvidia-smi's errors. A figure that the GPU does not report is None."""
    rows, words = smi_answer("gpu", list(FIELDS.values()), TALK_S)
    return [{name: figure(row[at]) for at, name in enumerate(FIELDS)} for row in (rows or [])[:MOST_CARDS]], words


def query(what: str, fields: Sequence[str], limit_s: float) -> Optional[List[List[str]]]:
    """Return these fields of each GPU, or of the processes on the GPUs; None if nvidia-smi is missing or fails."""
    return smi_answer(what, fields, limit_s)[0]


def smi_answer(what: str, fields: Sequence[str], limit_s: float) -> Tuple[Optional[List[List[str]]], str]:
    """Return the rows for `query`, and nvidia-smi's own error message.

    nvidia-smi writes its message to either output. A process that hangs in the kernel (with a failed GPU) is not waited
    for.
    """
    command = ["nvidia-smi", "--query-%s=%s" % (what, ",".join(fields)), "--format=csv,noheader,nounits"]
    try:
        child = subprocess.Popen(
            command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError:
        return None, ""
    try:
        out, err = (content.decode("utf-8", "replace") for content in child.communicate(timeout=limit_s))
    except subprocess.TimeoutExpired:
        child.kill()
        return None, "nvidia-smi %s within %.0f s" % (SILENT, limit_s)
    rows = [[word.strip() for word in line.split(",")] for line in out.splitlines()]
    good = [row for row in rows if len(row) == len(fields)]
    words = [line.strip() for line in (out + "\n" + err).splitlines() if line.strip()]
    if child.returncode or len(good) < len(rows):
        return (None if child.returncode else good), " / ".join(words[-LAST_LINES:])[-MOST_WORDS:]
    return good, ""


def figure(word: str) -> Optional[int]:
    """Return an integer, for example for `94` or `607.53`; None for a text such as `[N/A]`."""
    try:
        value = float(word)
    except ValueError:
        return None
    return int(value) if 0 <= value < 1e9 else None
