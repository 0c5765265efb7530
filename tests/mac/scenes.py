"""What a new user on a Mac does first, run inside the imitation: `python scenes.py SCENE` prints the result as JSON.

view      a run in a terminal, with its keys
killed    a run whose supervisor dies by kill -9, and is resumed
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

GPURUN = [str(Path(sys.executable).with_name("gpurun"))]
RUN = [*GPURUN, "train", "mini-gpt", "--provider", "local", "--yes"]
LIMIT_S = 240.0


def unfinished() -> list[dict[str, str]]:
    listed = subprocess.run([*GPURUN, "ps", "--json"], capture_output=True, timeout=LIMIT_S)
    return list(json.loads(listed.stdout)["data"]["runs"])


def view() -> dict[str, object]:
    """Follow a run in a terminal of 100 columns until its end; press a key without a meaning once."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="40")
        os.execv(RUN[0], RUN)
    drawn, end = b"", time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            block = os.read(terminal, 65536)
        except OSError:
            break
        if b"RUNNING" in block and b"RUNNING" not in drawn:
            os.write(terminal, b"x")
        drawn += block
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode("utf-8", "replace"))
    return {"exit": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "drawn": text}


def killed() -> dict[str, object]:
    """Kill the supervisor while the run trains, then resume the run and audit its receipt."""
    viewer = subprocess.Popen([*RUN, "--detach"], stdout=subprocess.DEVNULL, start_new_session=True)
    assert viewer.wait(LIMIT_S) == 0
    (run,) = unfinished()
    os.kill(int(re.findall(r"\d+", run["owner"])[0]), signal.SIGKILL)
    (dead,) = unfinished()
    resumed = subprocess.run([*GPURUN, "resume", run["run"]], capture_output=True, text=True, timeout=LIMIT_S)
    audited = subprocess.run([*GPURUN, "audit"], capture_output=True, text=True, timeout=LIMIT_S)
    output = resumed.stdout[-1500:] + resumed.stderr[-1500:] + audited.stdout
    return {"phase": dead["phase"], "driven": dead["owner"], "exit": resumed.returncode, "audit": audited.returncode,
            "said": output}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({"view": view, "killed": killed}[sys.argv[1]]()))
