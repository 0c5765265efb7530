"""The process that owns a run: it holds the run's lock and drives its lifecycle, whoever is watching.

    python -m gpurun.lifecycle.supervisor HOME RUN

It has no way to end gracefully and needs none: killed at any instruction, it is started again and replays the journal.
While something may be billed it does not give up: it tries again, every half minute at first.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO

from gpurun.core.clock import Clock, SystemClock, ticks
from gpurun.core.errors import ExitCode, GpurunError, RunHeld, VerificationFailed
from gpurun.core.model import Instance
from gpurun.core.paths import Home, RunFolder
from gpurun.core.progress import RunState
from gpurun.ledger.journal import read_journal
from gpurun.ledger.lock import RunLock, holder_of
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.driver import Driver
from gpurun.lifecycle.reach import Reach
from gpurun.lifecycle.runs import look, read_plan
from gpurun.lifecycle.state import place_of, replay
from gpurun.lifecycle.unrecorded import end_unrecorded, locked, open_journal
from gpurun.machine.far import FarSide
from gpurun.planning.bundle import bundle_root
from gpurun.providers.registry import open_provider

START_LIMIT_S = 20.0
AGAIN_S = 30.0
LONGEST_PAUSE_S = 600.0


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
    seen = cache(partial(_seen, home, folder, clock, reach, trainer))

    def see() -> tuple[RunState, Context]:
        state, context = seen()
        return state, context.on_offer(place_of(state, context.plan))

    with locked(RunLock(folder.lock), see):
        journal = open_journal(see)
        return Driver(seen()[1], journal).drive()


def end_at_once(home: Home, run: str, clock: Clock) -> None:
    """End a run's machine and see it gone with no record of it and no lock; what keeps it alive is raised."""
    state, context = _seen(home, home.run(run), clock)
    still_there = end_unrecorded(state, context.on_offer(place_of(state, context.plan)))
    if still_there is not None:
        raise still_there


def _seen(
    home: Home,
    folder: RunFolder,
    clock: Clock,
    reach: Callable[[Instance], FarSide] | None = None,
    trainer: Path | None = None,
) -> tuple[RunState, Context]:
    """The run as its journal has it, and what is needed to drive it; nothing is written."""
    plan = read_plan(folder)
    state = replay(plan.run, read_journal(folder.journal).records)
    # One of each for the supervisor's whole life: a provider keeps its rate limits, and its key is looked for once.
    opened = cache(partial(open_provider, home=home, clock=clock, choices=plan.choices))
    return state, Context(
        home=home,
        folder=folder,
        plan=plan,
        clock=clock,
        # The one of now: the key of an offer that was passed over may be gone.
        provider=opened(plan.approved[place_of(state, plan)].offer.provider),
        reach=reach or Reach(folder, plan, clock),
        trainer=trainer or bundle_root() / "trainer",
        open=opened,
        brings_early=reach is None,
    )


def start_supervisor(folder: RunFolder, home: Home, clock: Clock) -> None:
    """Start a detached supervisor unless the run has one; return when it holds the run or has ended."""
    if holder_of(folder.lock) is not None:
        return
    with _log_of(folder) as log:
        command = [sys.executable, "-m", "gpurun.lifecycle.supervisor", str(home.root), folder.name]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    for _ in ticks(clock, 0.02, START_LIMIT_S):
        if holder_of(folder.lock) is not None or child.poll() is not None:
            return


def _log_of(folder: RunFolder) -> BinaryIO:
    """The supervisor's log; nothing at all where it cannot be written, since a machine may be waiting to be ended."""
    try:
        return open(folder.supervisor_log, "ab")
    except OSError:
        return open(os.devnull, "ab")


def keep_on(supervised: Callable[[], ExitCode], is_billing: Callable[[], bool], clock: Clock) -> ExitCode:
    """Supervise, and again after a pause, as long as something may be billed; the last error is raised.

    Between two tries nobody holds the run: whoever waits for it hears that it is not proven gone, and may take over.
    """
    pause_s = AGAIN_S
    while True:
        try:
            return supervised()
        except RunHeld:
            raise
        except Exception as error:
            if not is_billing():
                raise
            if isinstance(error, GpurunError):
                logging.error("%s: %s %s Once more in %.0f s.", error.code, error.what, error.hint, pause_s)
            else:
                logging.error("gpurun itself failed. Once more in %.0f s.", pause_s, exc_info=error)
        clock.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)


def _is_billing(home: Home, run: str) -> bool:
    """Whether the run's journal, if it can be followed, has something that is not proven gone."""
    try:
        sight = look(home, run)
    except VerificationFailed:
        return False
    except Exception as error:  # noqa: BLE001 - what cannot be looked at now may be billed all the same.
        logging.error("The journal of %s cannot be looked at: %s", run, error)
        return True
    return sight.damage is None and sight.state.may_be_billing


def main() -> int:
    """Supervise, and tell the log what went wrong."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    home, run, clock = Home(Path(sys.argv[1])), sys.argv[2], SystemClock()
    try:
        return int(keep_on(partial(supervise, home, run, clock), partial(_is_billing, home, run), clock))
    except GpurunError as error:
        logging.error("%s: %s %s", error.code, error.what, error.hint)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
