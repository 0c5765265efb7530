"""Run the process that owns a run: it has the run's lock and drives the run, whether or not a user watches.

    python -m gpurun.lifecycle.supervisor HOME RUN

It may be killed at any instruction: the next supervisor replays the journal and resumes the run. While something may be
billed it keeps retrying, at first every half minute.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO

from gpurun.core.background_call import Background, Inline
from gpurun.core.clock import Clock, SystemClock, ticks
from gpurun.core.errors import ExitCode, GpurunError, MayBeBilling, RunHeld, SetupError, VerificationFailed
from gpurun.core.installed_files import bundle_root
from gpurun.core.journal_records import RunState
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import Instance
from gpurun.core.retry import Retry
from gpurun.core.settings import Setting, load_settings
from gpurun.ledger.budget import Budgets
from gpurun.ledger.fsync import require_durable
from gpurun.ledger.journal import Journal, JournalDamaged, read_journal
from gpurun.ledger.mandate import budgets_of
from gpurun.ledger.plan_from_journal import plan_of
from gpurun.ledger.run_lock import RunLock, holder_of
from gpurun.ledger.run_state import find_offer_place, replay_journal
from gpurun.ledger.runs import look_at_run
from gpurun.lifecycle.connect import MachineConnector
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.driver import Driver, end_unrecorded, ended_unrecorded, until_recorded
from gpurun.lifecycle.notices import Notices
from gpurun.lifecycle.ways_in import entries_kept
from gpurun.planning.own_box import login_to
from gpurun.providers.registry import open_provider
from gpurun.remote.client import FarSide

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
    outlived: Instance | None = None,
) -> ExitCode:
    """Drive a run until it is closed; return its exit code.

    Raise RunHeld if another process drives the run, and MayBeBilling if the machine's end is not proven. `outlived` is
    a machine of the run that was seen alive after its end was recorded; this is recorded, and the machine is ended
    again. If the run's folder cannot be written, the run must not cost more: raise the folder's error if nothing is
    billed; otherwise end the machine unrecorded and raise MayBeBilling.
    """
    folder = home.run(run)
    seen = cache(partial(_read_state_and_context, home, folder, clock, reach, trainer))

    def see() -> tuple[RunState, Context]:
        state, context = seen()
        return state, context.for_machine(state)

    def failed(error: SetupError) -> None:
        state, context = see()
        if not state.may_be_billing:
            raise error
        if context.must_end(state):
            raise ended_unrecorded(state, context, error) from error

    def opened() -> Journal:
        require_durable(folder.path)
        try:
            return Journal.open(folder.journal, clock)
        except JournalDamaged as error:  # A run with a damaged journal cannot be driven, and its machine may still run.
            if look_at_run(home, run).state.may_be_billing:
                raise MayBeBilling(error.code, error.what, hint=error.hint) from error
            raise

    with ExitStack() as held:
        # On a full disk, keep trying to get the lock and the journal while the run can still be saved.
        until_recorded(lambda: held.enter_context(RunLock(folder.lock)), clock, failed)
        driver = Driver(seen()[1], until_recorded(opened, clock, failed))
        if outlived is not None:
            driver.record_outlived(outlived)
        return driver.drive()


def end_at_once(home: Home, run: str, clock: Clock) -> None:
    """End a run's machine and prove that it is gone, without a record and without the run's lock.

    Raise the error if that fails.
    """
    state, context = _read_state_and_context(home, home.run(run), clock)
    still_there = end_unrecorded(state, context.for_machine(state))
    if still_there is not None:
        raise still_there


def _read_state_and_context(
    home: Home,
    folder: RunFolder,
    clock: Clock,
    reach: Callable[[Instance], FarSide] | None = None,
    trainer: Path | None = None,
) -> tuple[RunState, Context]:
    """Return the run's state from its journal and the context with which to drive it. Write nothing."""
    records = read_journal(folder.journal).records
    (plan, _), state = plan_of(folder, records), replay_journal(folder.name, records)
    # Each provider is opened once, because it keeps rate limits and reads its key when it is opened.
    opened = cache(partial(open_provider, home=home, clock=clock, choices=plan.choices, login=login_to))
    way = MachineConnector(folder, plan, clock)
    offer = plan.approved[find_offer_place(state, plan)].offer
    return state, Context(
        home=home,
        folder=folder,
        plan=plan,
        clock=clock,
        # Open only the current offer's provider: the key for an offer that was passed over may be gone.
        provider=opened(plan.choices.opened_as(offer.provider, offer.region)),
        reach=reach or way,
        trainer=trainer or (folder.trainer if plan.choices.trainer else bundle_root() / "trainer"),
        open=opened,
        brings_early=reach is None,
        budgets=budgets_of(home, clock, plan.mandate) if plan.worst_micros else Budgets(),
        begin=Background if isinstance(clock, SystemClock) else Inline,
        hang_up=way.hang_up,
    )


def start_supervisor(folder: RunFolder, home: Home, clock: Clock) -> None:
    """Start a detached supervisor unless the run has one. Return when it has the lock or has ended."""
    if holder_of(folder.lock) is not None:
        return
    with _open_log(folder) as log:
        command = [sys.executable, "-m", "gpurun.lifecycle.supervisor", str(home.root), folder.name]
        child = subprocess.Popen(  # The child calls the clouds, so it needs the keys in the environment.
            command, env=os.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    for _ in ticks(clock, 0.02, START_LIMIT_S):
        if holder_of(folder.lock) is not None or child.poll() is not None:
            return


def _open_log(folder: RunFolder) -> BinaryIO:
    """Open the supervisor's log, or /dev/null if it cannot be written: a machine may have to be ended now."""
    try:
        return open(folder.supervisor_log, "ab")
    except OSError:
        return open(os.devnull, "ab")


def keep_on(supervised: Callable[[], ExitCode], is_billing: Callable[[], bool], clock: Clock) -> ExitCode:
    """Call `supervised` until it succeeds, with pauses, while something may be billed; otherwise raise its last error.

    During a pause the run's lock is free, so a command that waits for the run can report that its machine is not proven
    gone, and may drive the run itself.
    """
    retry = Retry(clock, AGAIN_S, longest_s=LONGEST_PAUSE_S)

    def failed(error: Exception) -> None:
        if isinstance(error, RunHeld) or not is_billing():
            raise error
        if isinstance(error, GpurunError):
            logging.error("%s: %s %s Next try in %.0f s.", error.code, error.what, error.hint, retry.pause_s)
        else:
            logging.error("gpurun itself failed. Next try in %.0f s.", retry.pause_s, exc_info=error)

    return retry.until_done(supervised, Exception, failed=failed)


def _is_billing(home: Home, run: str) -> bool:
    """Return whether the run may have a machine that is not proven gone.

    Return True if the journal cannot be read, and False if it is damaged.
    """
    try:
        sight = look_at_run(home, run)
    except VerificationFailed:
        return False
    except Exception as error:  # noqa: BLE001 - a machine may still be billed.
        logging.error("The journal of %s cannot be read: %s", run, error)
        return True
    return sight.damage is None and sight.state.may_be_billing


def _make_notices(home: Home, run: str, clock: Clock) -> Notices:
    """Return the sender of notices. If the settings or the journal cannot be read, it sends nothing."""
    try:
        return Notices(home.run(run), clock, load_settings(home, project=home.root, environment=os.environ))
    except (GpurunError, OSError) as error:
        logging.warning("No notices are sent: %s", error)
        return Notices(home.run(run), clock, dict.fromkeys(("notify.url", "notify.exec"), Setting("", "")))


def main() -> int:
    """Drive the run named on the command line, log errors, and return the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    home, run, clock = Home(Path(sys.argv[1])), sys.argv[2], SystemClock()
    notices = _make_notices(home, run, clock)

    def supervised() -> ExitCode:
        try:
            return supervise(home, run, clock)
        except MayBeBilling as error:
            notices.may_be_billing(error)
            raise

    try:
        with notices.following(), entries_kept(home, home.run(run)):
            return int(keep_on(supervised, partial(_is_billing, home, run), clock))
    except GpurunError as error:
        logging.error("%s: %s %s", error.code, error.what, error.hint)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
