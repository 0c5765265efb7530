"""Shows a run to the user until it ends. The run does not depend on the view: its supervisor is another process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from math import inf
from shutil import disk_usage

from gpurun.cli.interrupts import Interrupts, costs_on, decide_on_silence, react_to_signal, silence_of
from gpurun.cli.panes import Pane, open_pane
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode, GpurunError, MayBeBilling, TrainingFailed, as_exit_code
from gpurun.core.job_terms import terms_in
from gpurun.core.journal_events import Incident, TrainObserved
from gpurun.core.journal_records import Phase, Record, last_typed
from gpurun.core.paths import RunFolder
from gpurun.core.untrusted import lines_of
from gpurun.ledger.journal import holder_of, read_journal
from gpurun.ledger.plan_from_journal import plan_of
from gpurun.ledger.runs import Sight, gave_up, look_at_run
from gpurun.lifecycle.notices import Noticed
from gpurun.lifecycle.supervisor import start_supervisor
from gpurun.readers.run_reader import RunReader

PERIOD_S = 0.2
_FULL_BYTES = 1 << 20
RESTARTS = 2
ASK_S = 20 * 60.0
"""After a machine has been silent for so many seconds, ask the user, if possible, what to do."""
LONGEST_TURN_S = 60.0  # A longer turn means that this computer slept.


class Viewer:
    """Shows a run to the user until it ends or the user leaves."""

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        on_interrupt: str,
        *,
        stream: bool = True,
        pane: Pane | None = None,
    ) -> None:
        self._session = session
        self._folder = folder
        self._on_interrupt = on_interrupt
        before = read_journal(folder.journal).records
        self._plan, _ = plan_of(folder, before)
        self._reader = RunReader(folder)
        self._pane = pane or open_pane(session, self._plan, stream=stream)
        self._restarts = 0
        self._records: list[Record] = []
        self._noticed = Noticed(folder, len(before), self._plan)
        self._warned_while_destroying = False
        self._is_unseen = False
        self._silence: Record | None = None
        self._silent_s, self._turn_mono = 0.0, session.clock.monotonic()

    def follow(self, heard: Interrupts | None = None) -> Result:
        """Show the run until it ends or the user leaves; handle the signals in `heard` first."""
        with nullcontext(heard) if heard is not None else Interrupts() as interrupts:
            try:
                while True:
                    number = interrupts.take()
                    left = self._answer(number) if number is not None else None
                    left = left or self._turn()
                    if left is not None:
                        return left
            finally:
                self._pane.close()

    def _turn(self) -> Result | None:
        """Read and show new records; return a Result if the view should end."""
        owned = holder_of(self._folder.lock) is not None  # Check this before reading, so that no late record is missed.
        news = self._reader.read()
        self._pane.show(news, self._session.clock.wall())
        if (
            self._pane.is_left()
            and (left := self._left_result(look_at_run(self._session.home, self._folder.name))) is not None
        ):
            return left
        if news.records:
            self._records += news.records
            last = news.records[-1].typed
            self._is_unseen = isinstance(last, Incident) and last.code == "create.unseen"
            self._note_silence(news.records)
        if self._session.interactive and (left := self._ask_about_silence()) is not None:
            return left
        if not news.is_empty:
            self._ring()
            return None
        if owned and self._is_unseen:  # The supervisor's search for the machine may last until the deadline.
            return result_without_supervisor(
                look_at_run(self._session.home, self._folder.name), self._session.clock.wall()
            )
        if not owned:
            sight = look_at_run(self._session.home, self._folder.name)
            if not sight.unfinished:
                return show_finished(self._session, sight)
            if (left := self._undriven(sight)) is not None:
                return left
        self._session.clock.sleep(PERIOD_S)
        return None

    def _ring(self) -> None:
        """Ring the terminal's bell and show a notification for each notice."""
        if self._session.interactive and self._records:
            for notice, message, _ in self._noticed.news(self._records, self._session.clock.wall()):
                self._session.ring(f"{self._folder.name} {notice}: {message}")

    def _note_silence(self, records: Iterable[Record]) -> None:
        """Record whether the machine is silent, also if its silence began before this view."""
        before, self._silence = self._silence, silence_of((*filter(None, (self._silence,)), *records))
        if self._silence is not None and self._silence is not before:
            since_wall = getattr(self._silence.typed, "since_wall", None)
            self._silent_s = max(0.0, self._session.clock.wall() - (inf if since_wall is None else since_wall))

    def _ask_about_silence(self) -> Result | None:
        """Ask repeatedly what to do about a machine that has long been silent; return a Result if the user leaves."""
        clock, silence = self._session.clock, self._silence
        gap_s, self._turn_mono = min(clock.monotonic() - self._turn_mono, LONGEST_TURN_S), clock.monotonic()
        self._silent_s = self._silent_s + gap_s if silence is not None else 0.0
        if silence is None or self._silent_s < ASK_S:
            return None
        sight = look_at_run(self._session.home, self._folder.name)
        self._pane.close()
        leave = decide_on_silence(self._session, sight, getattr(silence.typed, "message", ""))
        self._pane.reopen()
        self._silent_s, self._turn_mono = 0.0, clock.monotonic()
        return self._left_result(sight) if leave else None

    def _undriven(self, sight: Sight) -> Result | None:
        """Restart the supervisor of an unfinished run; return a Result if it must not be restarted."""
        if gave_up(sight) or self._restarts >= RESTARTS:
            return result_without_supervisor(sight, self._session.clock.wall())
        # The supervisor was killed; a new supervisor continues from the journal.
        self._restarts += 1
        start_supervisor(self._folder, self._session.home, self._session.clock)
        return None

    def _answer(self, number: int) -> Result | None:
        """Restore the terminal, react to a signal, and draw again; return a Result if the view should end."""
        sight = look_at_run(self._session.home, self._folder.name)
        if sight.state.phase is Phase.DESTROYING:
            if self._warned_while_destroying:
                return left_while_destroying(sight)
            self._warned_while_destroying = True
        self._pane.close()
        leave = react_to_signal(self._session, sight, number, self._on_interrupt)
        self._pane.reopen()
        return result_of_leaving(self._session, sight) if leave else None

    def _left_result(self, sight: Sight) -> Result | None:
        """Return the result for leaving the run; None if the run has ended."""
        if not sight.unfinished:
            return None
        is_ending = sight.state.phase is Phase.DESTROYING
        return left_while_destroying(sight) if is_ending else result_of_leaving(self._session, sight)


def follow_run(
    session: Session,
    folder: RunFolder,
    *,
    on_interrupt: str = "ask",
    stream: bool = True,
    heard: Interrupts | None = None,
) -> Result:
    """Show a run until it ends or the user leaves, and return a Result with the run's exit code.

    With `--json`, each record and event is printed as a line, unless `stream` is false. `heard` are the signals that
    this process has received since it started the run.
    """
    left = Viewer(session, folder, on_interrupt, stream=stream).follow(heard)
    if left.exit_code is ExitCode.MAY_BE_BILLING and session.interactive:
        session.ring(f"{folder.name} may be billing")
    return left


def result_of_leaving(session: Session, sight: Sight) -> Result:
    """Return the result for leaving a run: its hourly cost, and the command to return to it."""
    folder, costs = sight.folder, costs_on(sight, session.clock.wall())
    after = f"{folder.name} continues{f' ({costs})' if costs else ''}. To return: gpurun attach {folder.name}"
    return Result(data={"run": folder.name, "folder": str(folder.path)}, after=after, exit_code=ExitCode.PENDING)


def left_while_destroying(sight: Sight) -> Result:
    """Return the result for leaving before the machine is proven gone: it may be billing until then."""
    name = sight.folder.name
    what = f"{name} is still being destroyed and not yet proven gone; that continues without this terminal."
    error = MayBeBilling("run.may_be_billing", what, hint=f"To watch it: gpurun attach {name}")
    return Result(data={"run": name, "state": sight.state.phase}, errors=(error,), exit_code=error.exit_code)


def result_without_supervisor(sight: Sight, now: float | None = None) -> Result:
    """Return the result for an unfinished run without a supervisor: what may be billed, and the next command."""
    name = sight.folder.name
    what = gave_up(sight, now) or f"The supervisor of {name} ended before the run did: {read_supervisor_words(sight)}"
    if sight.state.may_be_billing:
        error: GpurunError = MayBeBilling(
            "run.may_be_billing", what, hint=f"Its supervisor keeps trying. To try now: gpurun destroy {name}"
        )
    else:
        error = GpurunError(
            "run.unfinished", what, hint=f"gpurun resume {name}; its log: {sight.folder.supervisor_log}"
        )
    return Result(data={"run": name, "state": sight.state.phase}, errors=(error,), exit_code=error.exit_code)


def read_supervisor_words(sight: Sight) -> str:
    """Return the supervisor's last line, and a sentence about the disk if it is full."""
    last = deque((line for line in lines_of(sight.folder.supervisor_log) if line.strip()), maxlen=1)
    full = f" The disk of {sight.folder.path} is full." if disk_usage(sight.folder.path).free < _FULL_BYTES else ""
    return (last[0][-300:] if last else "it wrote nothing.") + full


def show_finished(session: Session, sight: Sight) -> Result:
    """Return the result for a run that has ended: the receipt, the folder of the files, and any failure."""
    from gpurun.ledger.write_receipt import read_receipt
    from gpurun.readers.next_command import continuing_command, left_at, next_command
    from gpurun.view.receipt_files import files_home
    from gpurun.view.receipt_screen import receipt_screen

    receipt, state = read_receipt(session.home, sight.folder), sight.state
    predicate = receipt.predicate
    names = {home.title: [file["name"] for file in home.files] for home in files_home(predicate)}
    checkpoints, outputs = names["Checkpoints"], names["Outputs"]
    data = {
        "run": sight.folder.name,
        "folder": str(sight.folder.path),
        "verdict": predicate["verdict"]["is"],
        "outcome": state.outcome,
        "teardown": state.teardown,
        "cost_micros": predicate["cost"]["upper_bound_micros"],
        "receipt": str(sight.folder.receipt),
        "checkpoints": checkpoints,
        "outputs": outputs,
    }
    failure, step = state.failure, left_at(predicate)
    on = f"Its checkpoint of step {step} is downloaded. To continue from it: {continuing_command(predicate)}"
    errors: tuple[GpurunError, ...] = ()
    if failure:
        hint = on if step is not None and failure.code == "machine.lost" else failure.hint
        errors = (GpurunError(failure.code, failure.message, hint=hint),)
    elif state.outcome in ("failed", "lost"):
        errors = (_failure_error(sight, on if step is not None else ""),)
    text = ""
    if not session.quiet:
        then = next_command(predicate, sight.folder)
        text = session.draw(receipt_screen(receipt, session.style, now=session.clock.wall(), then=then))
    there = f"The {terms_in(predicate).files} are in {sight.folder.artifacts}"
    after = there if checkpoints or outputs else ""
    code = as_exit_code(state.exit_code if state.exit_code is not None else 1)
    if code is ExitCode.BUDGET_STOP and checkpoints:
        flag = "--hours" if sight.plan.lease.hours_s is not None else "--max-cost"
        after = f"{after}\n{flag} ended it. To continue: {continuing_command(predicate)} {flag} …"
    return Result(data=data, text=text, after=after, errors=errors, exit_code=code)


def _failure_error(sight: Sight, on: str) -> GpurunError:
    """Return the error for a job that failed or was cut off."""
    from gpurun.cli.failure_hints import failure_hint

    terms = sight.plan.job.terms
    ended = last_typed(sight.records, TrainObserved)
    assert ended is not None, "a failed or lost job has a record"
    message = ended.message
    what = f"{terms.work.capitalize()} {'was cut off' if ended.outcome == 'lost' else 'failed'}: {message}"
    if message.startswith(terms.work):
        what = message[:1].upper() + message[1:]
    return TrainingFailed(f"train.{ended.reason or 'failed'}", what, hint=failure_hint(sight, on))
