"""Drive a run: replay the journal, do the next step, record its notes. Only this module appends to the journal.

A step is a generator of notes. The driver writes a note to disk before it resumes the step, so every step records an
intent before it acts. After a crash the journal is replayed and the next step runs; no other recovery is needed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from threading import Event as Flag
from typing import NoReturn, TypeVar

from gpurun.core.background_call import Inline
from gpurun.core.clock import Clock
from gpurun.core.errors import ExitCode, GpurunError, MayBeBilling, NoOffer, SetupError, StoreFull, as_exit_code
from gpurun.core.journal_events import AddressChanged, Incident, Json, RunClosed, SeenMachine, StepFailed, StopRequested
from gpurun.core.journal_records import Event, Phase, Record, RunState
from gpurun.core.records import Instance
from gpurun.core.retry import Retry
from gpurun.core.stop_request import read_stop_request
from gpurun.ledger.journal import Journal, damaged_error, is_noted, newer_error
from gpurun.ledger.run_state import WORKING, Step, exit_code_of, next_step, replay_journal
from gpurun.ledger.runs import describe_lost_records, opening_record
from gpurun.lifecycle.context import Context, MachineMoved, Note, StepClock, StopWanted
from gpurun.lifecycle.instance.monitor import Monitor
from gpurun.lifecycle.job_spec import ends_unwatched
from gpurun.lifecycle.steps import (
    await_ready,
    close_run,
    collect_bucket,
    collect_files,
    create_machine,
    destroy_machine,
    hold_machine,
    move_run,
    stage_shards,
    upload_files,
)
from gpurun.lifecycle.steps import watch_training as run
from gpurun.providers.base import endpoint_of

T = TypeVar("T")


def salvage_all(state: RunState, context: Context) -> Iterator[Note]:
    """Remove the resources that the machine left, then download the files that it pushed.

    The resources come first because a volume is billed while it exists. A cluster's folder is not billed and contains
    the trainer's files, so those are downloaded before it is removed.
    """
    if state.shared == "holds":
        yield from collect_bucket.collect_pushed(state, context)
        return
    yield from close_run.clear_all(state, context)
    yield from collect_bucket.collect_pushed(state, context)


def continue_elsewhere(state: RunState, context: Context) -> Iterator[Note]:
    """Remove what is left of the earlier machines (if the last one is gone), then plan the run's next machine."""
    if state.phase is Phase.GONE:
        yield from close_run.close_machines(state, context)
    yield from move_run.move(state, context)


STEPS: dict[Step, Callable[[RunState, Context], Iterator[Note]]] = {
    Step.STAGE: stage_shards.stage,
    Step.CREATE: create_machine.create,
    Step.AWAIT_READY: await_ready.await_ready,
    Step.SHIP: upload_files.ship,
    Step.START: run.start_job,
    Step.WATCH: run.watch,
    Step.COLLECT: collect_files.collect,
    Step.HOLD: hold_machine.hold,
    Step.DESTROY: destroy_machine.destroy,
    Step.SALVAGE: salvage_all,
    Step.MOVE: continue_elsewhere,
    Step.SETTLE: close_run.settle_run,
}

BUG_PAUSE_S, PAUSE_S = 30.0, 3.0
TICK_S = 0.2
ABANDON_AFTER_S = 4.0
"""Seconds that a step has to end once its machine must be destroyed. After that the step is abandoned."""
_ABANDONED_TO_DESTROY = (Step.AWAIT_READY, Step.SHIP, Step.START, Step.WATCH, Step.COLLECT, Step.HOLD)
# A later supervisor could not observe these facts again.
_UNREPEATABLE = (Event.COLLECT_OBSERVED, Event.STEP_FAILED)


class Unrecorded(SetupError):
    """Raised if the journal cannot be written and waiting would save nothing. It ends this attempt to drive the run."""


class Driver:
    """Drives one run to its end. The caller holds the run's lock."""

    def __init__(self, context: Context, journal: Journal) -> None:
        self._context = context
        self._journal = journal
        self._monitor = Monitor(context.plan.run)
        self._replayed = -1, RunState(run=context.plan.run, phase=Phase.OPENED)

    def drive(self) -> ExitCode:
        """Do steps until the run is closed; return its exit code.

        Raise MayBeBilling if a machine's end cannot be proven or recorded. The run then stays open.
        """
        try:
            return self._drive()
        except MayBeBilling:
            raise
        except GpurunError as error:
            state = self._state()
            if not state.may_be_billing:
                raise
            raise self._end_and_explain(state, error) from error

    def record_outlived(self, instance: Instance) -> None:
        """Record that a machine still runs although its end was recorded. The run stays red until it is proven gone."""
        if instance.id not in self._state().late:
            self._record(close_run.came_late(instance, self._state()))

    def _end_and_explain(self, state: RunState, error: GpurunError) -> MayBeBilling:
        """End the machine of a run that can no longer be driven, and record nothing. Return the error to raise."""
        try:
            context = self._context_at(state)
        except GpurunError:  # For example a provider without a key.
            return self._make_may_be_billing(error)
        return ended_unrecorded(state, context, error)

    def _drive(self) -> ExitCode:
        state = self._state()
        lost = describe_lost_records(self._context.home, self._context.folder, state)
        if lost is not None:
            raise damaged_error(self._context.folder.journal, lost)
        if state.may_be_billing:
            self._context = replace(self._context, ends_mono=self._context_at(state).ends_by_their_clock(state))
        if not any(record.event is Event.RUN_OPENED for record in self._journal.records):
            endpoint = endpoint_of(self._context.provider)
            opened = opening_record(self._context.plan, self._context.folder, self._context.home, endpoint=endpoint)
            self._journal.append(opened)
        while True:
            try:
                code = self._turn()
            except GpurunError:
                raise
            except Exception as bug:  # noqa: BLE001 - reported by `_record_bug`, or raised if nothing is billed.
                self._record_bug(bug)
                continue
            if code is not None:
                return code

    def _turn(self) -> ExitCode | None:
        """Do one step. Return the run's exit code if it is closed, else None."""
        state = self._record_stops()
        step = next_step(state, lease_over=self._context_at(state).seconds_left(state) <= 0)
        if step is None:
            return as_exit_code(state.exit_code or 0)
        if step in (Step.STAGE, Step.CREATE) and state.newer and not state.token:
            raise newer_error(state.run, state.newer)
        if step is Step.CLOSE:
            self._journal.append(RunClosed(exit_code=exit_code_of(state)))
        else:
            self._run_step(step, state)
        return None

    def _record_bug(self, bug: Exception) -> None:
        """Record a bug between two steps and pause. Raise if nothing is billed or the machine must end now."""
        state = self._state()
        if not state.may_be_billing:
            raise bug
        error = self._bug_error(bug, "between two steps")
        if self._context_at(state).must_end(state):
            raise error from bug
        self._note_once(error)
        self._context.clock.sleep(BUG_PAUSE_S)

    def _record_stops(self) -> RunState:
        """Record a new stop request, if there is one, and the end of the lease, if it is over. Return the new state."""
        state = self._state()
        request = read_stop_request(self._context.folder)
        if request is not None and self._context.wants_stop(state) and state.phase not in (Phase.SETTLED, Phase.CLOSED):
            by_signal: Json = {"signal": request.signal} if request.signal else {}
            self._record(StopRequested(how=request.how, by=request.by, reason=request.reason, **by_signal))
            state = self._state()
        if self._context_at(state).is_lease_over(state):
            # Recorded, so that the run cannot continue or count as done after a crash or a clock that was set back.
            self._record(StopRequested(how="destroy", by="lease", reason="the lease is over"))
            if state.phase is Phase.TRAINING and self._context_at(state).plan.offer.rate_micros_per_hour:
                message = f"the end of the training was not seen here: {ends_unwatched(state)}"
                self._record(Incident(code="machine.unwatched", message=message))
        return self._state()

    def _context_at(self, state: RunState) -> Context:
        """Return the context for the offer and machine that the state names."""
        return self._context.for_machine(state)

    def _state(self) -> RunState:
        """Return the run's state as the journal records it."""
        records = self._journal.records
        if self._replayed[0] != len(records):
            self._replayed = len(records), replay_journal(self._context.plan.run, records)
        return self._replayed[1]

    def _attend(self) -> None:
        """Have the monitor check the run's machines at the provider, if a check is due."""
        state = self._state()
        if state.phase in WORKING and self._monitor.is_due(self._context.clock.monotonic()):
            for note in self._monitor.turn(state, self._context_at(state)):
                self._record(note)

    def _run_step(self, step: Step, state: RunState) -> None:
        """Run one step. Record a failure, so that the next step can act on it."""
        try:
            context = self._step_context(step, state)
            notes = STEPS[step](state, context)
            while (note := self._take_next_note(step, state, context, notes)) is not None:
                self._record(note)
        except StopWanted:
            return
        except MachineMoved as moved:
            machine = SeenMachine.from_instance(moved.machine)
            self._record(AddressChanged(message=f"{moved.what}; {moved.hint}", instance=machine))
            self._context.clock.sleep(PAUSE_S)  # A provider may alternate between two addresses forever.
        except Unrecorded:
            raise
        except StoreFull as error:
            self._note_once(error)
            self._context.clock.sleep(PAUSE_S)
        except MayBeBilling as error:
            self._give_up(error)
        except GpurunError as error:
            self._record_failure(step, state, error)
        except Exception as bug:  # noqa: BLE001 - a bug in gpurun must not leave a machine running.
            self._record_failure(step, state, self._bug_error(bug, f"in {step}"))

    def _step_context(self, step: Step, state: RunState) -> Context:
        """Return the context of one step.

        While the machine works, the clock of this context raises StopWanted after a stop request or once the step is
        abandoned.
        """
        context = replace(self._context_at(state), abandoned=Flag(), latest=lambda _: self._state())

        def between() -> None:
            if step is not Step.CREATE:  # A create request must return its result even if the run stops.
                context.raise_if_stopped(state)
            if context.begin is Inline:  # Otherwise `_take_next_note` does this beside the step.
                self._attend()

        if state.phase not in WORKING:
            return context
        if context.begin is Inline:
            self._attend()
        return replace(context, clock=StepClock(context.clock, between))

    def _take_next_note(self, step: Step, state: RunState, context: Context, notes: Iterator[Note]) -> Note | None:
        """Return the step's next note, or None at its end.

        Raise StopWanted if the step hangs and its machine must end now.
        """
        task = context.begin(partial(next, notes, None))
        clock, since_mono = self._context.clock, None
        while not task.wait(TICK_S):
            self._attend()
            if step not in _ABANDONED_TO_DESTROY or not self._context_at(state).must_end(state):
                since_mono = None
            elif since_mono is None:
                since_mono = clock.monotonic()
            elif clock.monotonic() - since_mono > ABANDON_AFTER_S:
                context.abandoned.set()
                context.hang_up()
                raise StopWanted
        note: Note | None = task.result()
        return note

    def _bug_error(self, bug: Exception, where: str) -> GpurunError:
        """Log the traceback of a bug, and return the error for the user."""
        logging.error("gpurun itself failed %s.", where, exc_info=bug)
        what = f"gpurun itself failed {where}: {type(bug).__name__}: {bug}."
        hint = f"The trace is in {self._context.folder.supervisor_log}; please report it."
        return GpurunError("bug", what, hint=hint)

    def _record(self, note: Note) -> None:
        """Append a note to the journal. While this disk is full, keep trying: the machine trains under its lease.

        If the machine must end after this note, or its lease ends during the wait, end the machine first. After that,
        keep trying only for notes that no later supervisor could record again. The same holds for a note that is the
        only record of a machine. Raise Unrecorded if waiting would save nothing.
        """
        is_gone = False

        def failed(error: SetupError) -> None:
            nonlocal is_gone
            state, after = self._state(), self._state_after(note)
            is_new = note.event is Event.INCIDENT and after.may_be_billing and not state.may_be_billing
            is_working = state.may_be_billing and state.phase in WORKING
            may_wait = is_new or (is_working and error.code == "disk.full")
            is_gone = is_gone or (may_wait and self._end_if_unneeded(after if is_new else state, after))
            if not may_wait or (is_gone and not is_new and note.event not in _UNREPEATABLE):
                raise Unrecorded(error.code, error.what, hint=error.hint) from error

        until_recorded(lambda: self._journal.append(note), self._context.clock, failed)

    def _state_after(self, note: Note) -> RunState:
        """Return the state that the run will have after this note."""
        last = self._journal.records[-1]
        data = note.as_data()
        after = Record(
            seq=last.seq, prev="", wall=last.wall, mono=last.mono, boot_id=last.boot_id, event=note.event, data=data
        )
        return replay_journal(self._context.plan.run, [*self._journal.records, after])

    def _end_if_unneeded(self, state: RunState, after: RunState) -> bool:
        """End the machine if the state `after` does not need it. Return whether it is proven gone."""
        context = self._context_at(state)
        return context.must_end(after) and end_unrecorded(state, context) is None

    def _note_once(self, error: GpurunError) -> None:
        """Record an error as an incident, unless the journal has it already."""
        incident = Incident(code=error.code, message=f"{error.what} {error.hint}")
        if not is_noted(self._context.folder.journal, self._journal.records, incident):
            self._record(incident)

    def _record_failure(self, step: Step, before: RunState, error: GpurunError) -> None:
        """Record the failure of a step. Raise MayBeBilling if the same step would only fail again."""
        if step is Step.SETTLE:
            raise error
        if step is Step.DESTROY:
            self._give_up(self._make_may_be_billing(error))
        self._record(
            StepFailed(step=step, code=error.code, message=error.what, hint=error.hint, exit_code=error.exit_code)
        )
        still = before.phase is Phase.CREATING and self._state().phase is Phase.CREATING
        if still and not isinstance(error, NoOffer):
            self._give_up(self._make_may_be_billing(error))

    def _give_up(self, error: MayBeBilling) -> NoReturn:
        """Record the error and raise it. The run stays open and red, and the next attempt to drive it resumes it."""
        self._record(Incident(code=error.code, message=f"{error.what} {error.hint}"))
        raise error

    def _make_may_be_billing(self, error: GpurunError) -> MayBeBilling:
        """Return the error as MayBeBilling, whose exit code outranks all others: a machine is not proven gone."""
        run, by_hand = self._context.plan.run, self._console_url()
        hint = f"{error.hint} Then: gpurun destroy {run}" + (f", or end it by hand: {by_hand}" if by_hand else ".")
        return MayBeBilling(error.code, error.what, hint=hint)

    def _console_url(self) -> str:
        """Return the URL where the user can end the machine by hand; "" if its provider cannot be opened."""
        with contextlib.suppress(GpurunError):
            return self._context_at(self._state()).provider.traits.console_url
        return ""


def until_recorded(attempt: Callable[[], T], clock: Clock, failed: Callable[[SetupError], None]) -> T:
    """Repeat an attempt until it raises no SetupError, such as a full disk; return its result.

    `failed` is called with each error. It raises if waiting would save nothing.
    """
    logged: set[str] = set()

    def log_once(error: SetupError) -> None:
        failed(error)
        if error.code not in logged:
            logged.add(error.code)
            logging.error("%s: %s %s", error.code, error.what, error.hint)

    return Retry(clock, PAUSE_S).until_done(attempt, SetupError, failed=log_once)


def end_unrecorded(state: RunState, context: Context) -> GpurunError | None:
    """Do the destroy step without recording it. Return None if every machine is proven gone, otherwise the error.

    If the journal has a machine that was found after its recorded end, or a left resource, everything of the run is
    removed.
    """
    is_late = bool(state.late or state.leftover)
    try:
        for _ in close_run.clear_all(state, context) if is_late else destroy_machine.destroy(state, context):
            pass
    except GpurunError as error:
        return error
    return None


def ended_unrecorded(state: RunState, context: Context, error: GpurunError) -> MayBeBilling:
    """End the machine of a run that can no longer be driven. Return an error that states whether it is gone."""
    run, by_hand = state.run, context.provider.traits.console_url
    still_there = end_unrecorded(state, context)
    if still_there is None:
        what = f"{error.what} The machine was ended and is gone, but the proof is not on record."
        return MayBeBilling(error.code, what, hint=f"{error.hint} Then, for its receipt: gpurun resume {run}.")
    hint = f"{error.hint} Then: gpurun destroy {run}" + (f", or end it by hand: {by_hand}" if by_hand else ".")
    return MayBeBilling(error.code, f"{error.what} {still_there.what}", hint=hint)
