"""Our side of bench_transfer: a process of its own that ships a folder or downloads a file."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpurun.core.clock import SystemClock
from gpurun.core.records import Address
from gpurun.remote.archive import Pack, survey
from gpurun.remote.client import FarSide
from gpurun.remote.interface import MachineLost
from gpurun.remote.ssh import RemoteMachine
from tests.memory import own_peak_bytes

NAME = "checkpoints/000001.model.safetensors"


def machine_at(port: int, work: Path) -> RemoteMachine:
    address = Address(kind="ssh", host="127.0.0.1", port=port, user=os.environ.get("USER", "root"))
    return RemoteMachine(
        address,
        client_key=work / "keys" / "client",
        host_key=(work / "keys" / "host.pub").read_text(),
        folder=str(work / "there"),
        clock=SystemClock(),
    )


def log_in(machine: RemoteMachine) -> None:
    with suppress(MachineLost):  # The loop below tries again.
        machine.call(["true"], timeout_s=30)


def do_ours(what: str, source: Path, port: int, work: Path, size_bytes: int) -> None:
    """Ship a folder, or download a file ("home"), after the agent is installed; print the figures as JSON.

    The login is timed too, in parallel with the survey of the files: in a run both are over before the transfer.
    """
    machine = machine_at(port, work)
    far = FarSide(machine, python=sys.executable)
    while True:
        try:
            far.install_agent()
            break
        except MachineLost:
            continue
    far.close()
    if what == "home":
        sha256 = source.with_suffix(".sha256").read_text()
        (work / "there" / "out" / "checkpoints").mkdir(parents=True)
        os.link(source, work / "there" / "out" / NAME)
        file = {"name": NAME, "bytes": size_bytes, "sha256": sha256, "kind": "weights", "step": 1}
        listed = {"v": 1, "latest": 1, "best": None, "files": [file]}
        (work / "there" / "out" / "MANIFEST.json").write_text(json.dumps(listed))
    started, tries = time.perf_counter(), 0
    if what == "ship":
        threading.Thread(target=log_in, args=(machine,), daemon=True).start()
    pack = Pack(survey({"data": source} if what == "ship" else {}))
    while True:
        try:
            tries += 1
            if what == "ship":
                far.unpack(pack)
            else:
                far.manifest(size_bytes)
                far.fetch(NAME, size_bytes, sha256, work / "home")
            break
        except MachineLost:
            continue
    seconds = time.perf_counter() - started
    shutil.rmtree(work / "home", ignore_errors=True)
    memory = own_peak_bytes()
    print(json.dumps({"seconds": seconds, "memory_bytes": memory, "tries": tries}))


if __name__ == "__main__":
    what, source, port, work, size_bytes = sys.argv[1:]
    do_ours(what, Path(source), int(port), Path(work), int(size_bytes))
