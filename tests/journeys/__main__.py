"""The journeys of docs/dev/ARCHITECTURE.md: `python -m tests.journeys NAME...` prints each one's files, as JSON.

They need a fresh process, because code that a test has already run once might not run again. The journeys of RENTAL
share one rental.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.journeys.trace import Trace, traced

STEPS = "gpurun/lifecycle/steps/"


def plan() -> set[str]:
    """Return the files of `gpurun plan --gpu 8xA100 --max-cost 60`, at the catalogue's prices."""
    from gpurun.cli.app import main

    sys.argv = ["gpurun", "plan", "--gpu", "8xA100", "--max-cost", "60", "--json"]
    with traced() as trace, contextlib.suppress(SystemExit):
        main()
    return trace.files


def run() -> set[str]:
    """Return the files of a whole run on this computer, as its supervisor drives it."""
    return _rental().files


def close() -> set[str]:
    """Return the files of the step that closes a run."""
    return _below(f"{STEPS}close_run.py")


def download() -> set[str]:
    """Return the files of a checkpoint's download, in the step that collects."""
    return _below(f"{STEPS}collect_files.py")


def receipt() -> set[str]:
    """Return the files that write, sign and chain a receipt."""
    return _below("gpurun/ledger/write_receipt.py")


def create() -> set[str]:
    """Return the files of a create request on RunPod: the step, with RunPod's provider in place of the local one."""
    from tests.contract.clouds import runpod
    from tests.contract.orders import order

    here = ("gpurun/providers/local", "gpurun/providers/processes")
    step = {name for name in _below(f"{STEPS}create_machine.py") if not name.startswith(here)}
    with runpod() as customers:
        wanted = order(customers.mine)
        with traced() as trace:
            customers.mine.create(wanted)
    return step | trace.files


def upload() -> set[str]:
    """Return the files of an upload over SSH: those entered here, and those that the agent loads for it."""
    from gpurun.core.clock import SystemClock
    from gpurun.core.records import Address
    from gpurun.remote.archive import Pack, survey
    from gpurun.remote.client import FarSide
    from gpurun.remote.key_pairs import make_keys
    from gpurun.remote.ssh import RemoteMachine
    from tests.emulators import sshd

    folder = Path(tempfile.mkdtemp())
    keys, shards = make_keys(folder / "keys"), folder / "shards"
    shards.mkdir()
    (shards / "train_000001.bin").write_bytes(bytes(1 << 20))
    server = sshd.Sshd(folder / "sshd", host_keys=(folder / "keys" / "host",), authorized_keys=[keys.client_public])
    address = Address(kind="ssh", host="127.0.0.1", port=server.port, user=server.user)
    client, there = folder / "keys" / "client", str(folder / "box")
    machine = RemoteMachine(address, client_key=client, host_key=keys.host_public, folder=there, clock=SystemClock())
    try:
        with traced() as trace:
            far = FarSide(machine, python=sys.executable)
            far.install_agent()
            far.unpack(Pack(survey({"data": shards})), "zstd")
    finally:
        machine.close()
        server.close()
    return trace.files | _loaded_by_agent("begin", "receive", "settle")


def _loaded_by_agent(*verbs: str) -> set[str]:
    """Return the files of the agent that these verbs load."""
    from gpurun.remote.agent.__main__ import VERBS

    before = set(sys.modules)
    for verb in verbs:
        __import__(f"gpurun.remote.agent.{VERBS[verb]}")
    loaded = {name for name in {*sys.modules} - before if name.startswith("gpurun.remote.agent.")}
    return {f"{name.replace('.', '/')}.py" for name in loaded}


def training() -> set[str]:
    """Return the files of a small GPT's training in one process: set-up, steps, evaluation, checkpoint, sample."""
    from tests.trainer.tiny_training import recipe_record, write_data
    from trainer.train import main

    folder = Path(tempfile.mkdtemp())
    data, recipe = write_data(folder / "data"), folder / "recipe.json"
    recipe.write_text(json.dumps(recipe_record(train={"steps": 2})))
    with traced() as trace, contextlib.suppress(SystemExit):
        main(["--recipe", str(recipe), "--data", str(data), "--out", str(folder / "out")])
    return trace.files


@functools.cache
def _rental() -> Trace:
    """Return the trace of a run on this computer, with a trainer that does not need torch."""
    from gpurun.core.paths import Home
    from tests.lifecycle.drive import drive
    from tests.lifecycle.tiny_runs import make_run

    home = Home(Path(tempfile.mkdtemp()))
    make_run(home)
    steps = [f"{STEPS}{name}.py" for name in ("create_machine", "collect_files", "close_run")]
    with traced(*steps, "gpurun/ledger/write_receipt.py") as trace:
        assert drive(home, "fox-41") == 0
    return trace


def _below(file: str) -> set[str]:
    return _rental().below[file]


JOURNEYS: dict[str, Callable[[], set[str]]] = {
    step.__name__: step for step in (plan, run, close, create, upload, training, download, receipt)
}

RENTAL = ("run", "close", "create", "download", "receipt")
"""The journeys that are traced in one rental."""

if __name__ == "__main__":
    print(json.dumps({name: sorted(JOURNEYS[name]()) for name in sys.argv[1:]}))
