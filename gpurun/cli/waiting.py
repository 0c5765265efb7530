"""Waits for a run: for its machine (`train --detach`) or for its end (`wait`)."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

from gpurun.cli.interrupts import Interrupts
from gpurun.cli.panes import SilentPane
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.viewer import Viewer, read_supervisor_words, result_of_leaving, result_without_supervisor
from gpurun.core.errors import ExitCode, GpurunError, Interrupted
from gpurun.core.journal_records import Event, Phase
from gpurun.core.paths import RunFolder
from gpurun.core.stop_request import read_stop_request
from gpurun.ledger.runs import Sight, gave_up, look_at_run
from gpurun.readers.run_status import held_word

_FIRST = Path("/proc/1/comm")
_INITS = ("systemd", "init", "launchd")
_CODES: dict[int, ExitCode] = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class _UntilReady(Viewer):
    """Follows a run until its machine is ready or the run ends, without restarting a dead supervisor."""

    def _turn(self) -> Result | None:
        return self._ready() or super()._turn()  # Signals are handled just before this call.

    def _ready(self) -> Result | None:
        sight = look_at_run(self._session.home, self._folder.name)
        is_ending = read_stop_request(self._folder) or sight.state.failure or not sight.unfinished
        if (
            is_ending
            or sight.owner is None
            or not any(record.event is Event.READY_OBSERVED for record in sight.records)
        ):
            return None
        return replace(result_of_leaving(self._session, sight), exit_code=ExitCode.DONE)

    def _undriven(self, sight: Sight) -> Result | None:
        if gave_up(sight):
            return result_without_supervisor(sight, self._session.clock.wall())
        name = sight.folder.name
        what = f"The supervisor of {name} ended before its machine was ready: {read_supervisor_words(sight)}"
        error = GpurunError("detach.undriven", what, hint=f"gpurun resume {name}, or gpurun destroy {name}")
        code = ExitCode.MAY_BE_BILLING if sight.state.may_be_billing else ExitCode.PENDING
        return Result(data={"run": name, "state": sight.state.phase}, errors=(error,), exit_code=code)


class _UntilEnd(Viewer):
    """Follows a run silently until it ends; a signal ends only the waiting.

    If the machine is held, which may require the user to act, a message is printed once.
    """

    _said_held = False

    def _turn(self) -> Result | None:
        left = super()._turn()
        if not self._said_held and any(record.event is Event.HOLD_INTENDED for record in self._records):
            self._said_held = True
            state = look_at_run(self._session.home, self._folder.name).state
            if state.phase is Phase.HELD:
                self._session.say(f"{self._folder.name} is {held_word(state)}: {state.hold_why}.")
        return left

    def _answer(self, number: int) -> Result | None:
        name = self._folder.name
        error = Interrupted(
            "wait.interrupted", f"{name} continues; only the waiting ended.", hint=f"gpurun wait {name}"
        )
        return Result(data={"run": name}, errors=(error,), exit_code=_CODES.get(number, ExitCode.PENDING))


def wait_until_ready(session: Session, folder: RunFolder, on_interrupt: str, heard: Interrupts) -> Result:
    """Wait until a run's machine is ready and its supervisor drives it; if the run ends before that, return its result.

    If the supervisor died, the exit code is 8, or 9 if the run may be billing.
    """
    if (os.getpid() == 1 or os.getppid() == 1) and _FIRST.exists() and _FIRST.read_text().strip() not in _INITS:
        session.say(
            f"When this container's first process ends, the supervisor ends too. Use: gpurun wait {folder.name}"
        )
    return _UntilReady(replace(session, no_progress=True), folder, on_interrupt, stream=False).follow(heard)


def wait_until_over(session: Session, folder: RunFolder) -> Result:
    """Wait for a run to end, and return its result; exit 130 or 143 if a signal ended the waiting."""
    return _UntilEnd(session, folder, "", pane=SilentPane()).follow()
