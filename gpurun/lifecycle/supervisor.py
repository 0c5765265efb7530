"""The process that owns a run: it holds the run's lock and drives its lifecycle, whoever is watching.

    python -m gpurun.lifecycle.supervisor HOME RUN

It has no way to end gracefully and needs none: killed at any instruction, it is started again and replays the journal.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gpurun.core.clock import Clock, SystemClock, ticks
from gpurun.core.errors import ExitCode, GpurunError, SetupError
from gpurun.core.model import Instance, Plan
from gpurun.core.paths import Home, RunFolder
from gpurun.ledger.durable import require_durable
from gpurun.ledger.journal import Journal
from gpurun.ledger.lock import RunLock, holder_of
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.driver import Driver
from gpurun.machine.far import FarSide
from gpurun.machine.local import LocalMachine
from gpurun.planning.bundle import bundle_root
from gpurun.providers.registry import open_provider

START_LIMIT_S = 20.0


def supervise(
    home: Home,
    run: str,
    clock: Clock,
    *,
    reach: Callable[[Instance], FarSide] | None = None,
    trainer: Path | None = None,
) -> ExitCode:
    """Own a run until it is closed; RunHeld when another process does, MayBeBilling when death is not proven."""
    folder = home.run(run)
    with RunLock(folder.lock):
        plan = Plan.from_json(folder.plan.read_bytes())
        require_durable(folder.path)
        journal = Journal.open(folder.journal, clock)
        provider = open_provider(plan.offer.provider, home, clock)
        context = Context(
            home=home,
            folder=folder,
            plan=plan,
            clock=clock,
            provider=provider,
            reach=reach or reach_instance,
            trainer=trainer or bundle_root() / "trainer",
        )
        return Driver(context, journal).drive()


def reach_instance(instance: Instance) -> FarSide:
    """The way to an instance's agent."""
    if instance.address is None or instance.address.kind != "folder":
        raise SetupError(
            "machine.no_way",
            f"This gpurun has no way to reach {instance.id}: it knows only instances on this machine.",
            hint="Look for a newer gpurun; the instance is being destroyed.",
        )
    return FarSide(LocalMachine(Path(instance.address.folder), token=instance.token), python=sys.executable)


def start_supervisor(folder: RunFolder, home: Home, clock: Clock) -> None:
    """Start a detached supervisor unless the run has one; return when it holds the run or has ended."""
    if holder_of(folder.lock) is not None:
        return
    with open(folder.supervisor_log, "ab") as log:
        command = [sys.executable, "-m", "gpurun.lifecycle.supervisor", str(home.root), folder.name]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    for _ in ticks(clock, 0.02, START_LIMIT_S):
        if holder_of(folder.lock) is not None or child.poll() is not None:
            return


def main() -> int:
    """Supervise, and tell the log what went wrong."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    home, run = Home(Path(sys.argv[1])), sys.argv[2]
    try:
        return int(supervise(home, run, SystemClock()))
    except GpurunError as error:
        logging.error("%s: %s %s", error.code, error.what, error.hint)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
